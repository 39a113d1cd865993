"""Running a function in a short-lived thread of its own, which Ctrl-C does not reach.

Python runs signal handlers in the main thread, between any two bytecodes. What must be done whole,
or not at all, is done in another: its capture mode and its context are its own too.
"""

from __future__ import annotations

import _thread
import atexit
import contextvars
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
_local = threading.local()
_running: set[_thread.LockType] = set()  # one lock a function that runs; released at its end


def is_apart() -> bool:
    """Whether this is a thread of `begin`'s."""
    return getattr(_local, "is_apart", False)


def run(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)` in a thread of its own; returns what it returns, raises what it raises.

    Ctrl-C is raised here at once, and the thread goes on to its end: what the function does must be
    found by whoever asks again. A process that ends waits for it.
    """
    return begin(function, *args)()


def begin(function: Callable[..., T], *args: Any) -> Callable[[], T]:
    """Start `function(*args)` as `run` does and go on; the result waits for what `run` gives.

    Where there is no other thread to have, it is done when the result is asked.
    """
    if is_apart() or sys.is_finalizing():
        return partial(function, *args)
    task = [partial(contextvars.copy_context().run, function, *args)]
    result: list[T] = []
    failure: list[BaseException] = []
    done = threading.Lock()
    done.acquire()

    def work() -> None:
        _running.add(done)
        _local.is_apart = True
        try:
            result.append(task.pop()())
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            failure.append(error)
        finally:
            _running.discard(done)
            done.release()  # nothing of the caller's lives in this thread any more

    # Not threading.Thread: Ctrl-C inside its start() can keep a lock that the new thread needs;
    # that thread never begins, and the process never ends.
    try:
        _running.add(done)  # `wait` may be called before the thread begins
        _thread.start_new_thread(work, ())
    except BaseException as error:
        _running.discard(done)  # what has begun all the same says so itself
        if isinstance(error, RuntimeError):  # ending, or the system has no thread to give
            return partial(function, *args)
        raise

    def found() -> T:
        with done:
            pass
        if failure:
            try:
                raise failure[0]
            finally:
                failure.clear()  # its traceback holds this frame
        return result.pop()

    return found


def begin_held(function: Callable[[], object]) -> threading.Lock | None:
    """Start `function()` as `begin` does: the lock that its thread holds up to the end. None where
    there is no thread to have, and nothing was done."""
    held = threading.Lock()
    held.acquire()

    def work() -> None:
        try:
            function()
        finally:
            held.release()

    return None if isinstance(begin(work), partial) else held


@atexit.register
def wait() -> None:
    """Until every function that Ctrl-C left running is at its end."""
    while _running:
        for done in tuple(_running):
            with done:
                pass


if hasattr(os, "register_at_fork"):  # a child has none of the threads
    os.register_at_fork(after_in_child=_running.clear)
