"""An engine for asyncio: one thread owns it and steps it, the event loop asks it by a queue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

from ..errors import KernelHubError, RequestError
from .requests import Delta, Request

logger = logging.getLogger(__name__)
MOST_FAILURES = 3  # steps in a row, after which the engine is given up
Said = list[tuple[str, Delta | Exception | None]]  # of requests; None: the engine has taken it


class EngineError(KernelHubError):
    """An engine failed at a request, or is given up."""


class Worker:
    """Steps `engine` while it has work; `stats` are its own after the last step.

    A step that raises ends every request that the engine holds; the third in a row ends the thread.
    One that takes over `step_limit_s` makes it `ill` meanwhile.
    """

    def __init__(self, engine: Any, step_limit_s: float) -> None:
        self.stats: dict[str, Any] = engine.stats()
        self._engine, self._step_limit_s = engine, step_limit_s
        self._asked: queue.SimpleQueue[Callable[[], Said] | None] = queue.SimpleQueue()
        self._answers: dict[str, asyncio.Queue[Any]] = {}  # the loop's, by request
        self._held: set[str] = set()  # the thread's: requests of the engine
        self._stepping_since, self._failures, self._dead = float("inf"), 0, ""
        self._thread = threading.Thread(target=self._run, name="kernel_hub engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that did not run after the last step."""
        return len(self._answers) - int(self.stats["running"])

    @property
    def ill(self) -> str:
        """Why no answer is to be expected, or ''."""
        if time.monotonic() - self._stepping_since > self._step_limit_s:
            return f"a step of the engine has taken over {self._step_limit_s:g} s"
        return self._dead

    async def deltas(self, requests: Sequence[Request]) -> AsyncGenerator[Delta | None, None]:
        """None once the engine has taken all, then deltas until all have ended.

        Raises RequestError where the engine refuses one, EngineError where it fails, and what
        `fail_all` is given. Whoever asks says when it goes: `leave`.
        """
        self._loop, answers = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self._answers.update((one.id, answers) for one in requests)
        self._asked.put(partial(self._submit, requests))
        num_left = len(requests)
        while num_left:
            said = await answers.get()
            if isinstance(said, Exception):
                raise said
            if said and said.finish_reason in ("error", "abort"):
                raise EngineError(said.error or "the engine gave the request up")
            num_left -= bool(said and said.finish_reason)
            yield said

    def leave(self, requests: Sequence[Request]) -> None:
        """Nobody waits for them any more: those that have not ended are aborted."""
        left = [one.id for one in requests if self._answers.pop(one.id, None)]
        if left:
            self._asked.put(partial(self._abort, left))

    def fail_all(self, error: Exception) -> None:
        """Raise it for everybody who waits; leaving, they abort their requests."""
        for answers in set(self._answers.values()):
            answers.put_nowait(error)

    def stop(self, timeout_s: float) -> None:
        """End the thread."""
        self._asked.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("the engine's thread is left behind, a step of it does not end")

    def _deliver(self, said: Said, stats: dict[str, Any]) -> None:
        self.stats = stats
        for name, one in said:
            if answers := self._answers.get(name):
                answers.put_nowait(one)
                if isinstance(one, Delta) and one.finish_reason:
                    del self._answers[name]

    # What follows runs on the engine's thread.

    def _run(self) -> None:
        try:
            while ask := self._asked.get():
                said, stats = ask(), self._engine.stats()
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left
                    self._loop.call_soon_threadsafe(self._deliver, said, stats)
                if self._engine.has_work and self._asked.empty():
                    self._asked.put(self._step)
            self._abort(list(self._held))
        except Exception as error:  # noqa: BLE001 - the engine's own
            self._dead = f"the engine is given up: {_failed(error, 'and its thread ends')}"

    def _submit(self, requests: Sequence[Request]) -> Said:
        try:
            for one in requests:
                self._held.add(one.id)
                self._engine.submit(one)
            return [(requests[0].id, None)]
        except RequestError as error:
            return [(requests[0].id, error)]
        except Exception as error:  # noqa: BLE001 - as above
            return [(requests[0].id, _failed(error, "to take a request"))]

    def _abort(self, names: Sequence[str]) -> Said:
        for name in names:
            self._engine.abort(name)
        self._held.difference_update(names)
        return []

    def _step(self) -> Said:
        self._stepping_since = time.monotonic()
        try:
            deltas = self._engine.step()
        except Exception as error:
            self._failures += 1
            if self._failures == MOST_FAILURES:
                raise
            hurt, problem = list(self._held), _failed(error, "in a step")
            self._abort(hurt)
            return [(name, problem) for name in hurt]
        finally:
            self._stepping_since = float("inf")
        self._failures = 0
        self._held -= {delta.request_id for delta in deltas if delta.finish_reason}
        return [(delta.request_id, delta) for delta in deltas]


def _failed(error: Exception, at: str) -> EngineError:
    logger.error("the engine failed %s", at, exc_info=error)
    return EngineError(f"the engine failed: {type(error).__name__}: {error}")
