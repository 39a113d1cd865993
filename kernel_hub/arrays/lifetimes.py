"""Noticing that objects died, so that what they held is given back once, whatever Ctrl-C ends.

A finaliser is Python, and Ctrl-C may end it before it has done anything. A weak reference's
callback is C code, which Ctrl-C cannot end: it only queues, and `Watches.drain` does the rest.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar


class Held:
    """What an object holds and its death gives back."""

    __slots__ = ()

    @property
    def is_held_up(self) -> bool:
        """Whether a `release` came to nothing for now, as in a graph capture."""
        return False

    def release(self) -> Exception | None:
        """Give it back; a second time does nothing. Returns what went wrong.

        Ctrl-C comes before, and then nothing has happened, or after.
        """
        raise NotImplementedError


H = TypeVar("H", bound=Held)


class Watch(weakref.ref[Any], Generic[H]):
    """Notices one object's death."""

    __slots__ = ("held",)
    held: H


class Watches(Generic[H]):
    """A watch for each object of some kind: `live` until what it held is given back."""

    def __init__(self) -> None:
        self.live: set[Watch[H]] = set()
        self.dead: deque[Watch[H]] = deque()

    def add(self, owner: object, held: H) -> Watch[H]:
        """Watch `owner`, whose own finaliser releases `held` where Ctrl-C lets it."""
        watch: Watch[H] = Watch(owner, self.dead.append)
        watch.held = held
        self.live.add(watch)
        return watch

    def __iter__(self) -> Iterator[H]:
        return iter([watch.held for watch in tuple(self.live)])

    def drain(self) -> None:
        """Release what the dead still hold. Raises what goes wrong."""
        for watch in list(self.dead):
            error = watch.held.release()
            if watch.held.is_held_up:
                continue
            self.live.discard(watch)
            with suppress(ValueError):  # another thread was there
                self.dead.remove(watch)
            if error:
                raise error

    def clear(self) -> None:
        """Forget them all (tests give the next one another driver)."""
        self.live.clear()
        self.dead.clear()
