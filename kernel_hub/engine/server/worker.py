"""The one thread that owns an engine and steps it; the event loop asks it by a queue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ...errors import RequestError
from ..requests import Delta, Request
from .refusals import ApiError

logger = logging.getLogger(__name__)
MOST_FAILURES = 3  # steps in a row, after which the engine is given up
Said = Delta | ApiError | RequestError | None  # None: the engine has taken the requests


class Worker:
    """Steps `engine` while it has work; `stats` are its own after the last step.

    A step that raises ends every request that the engine holds; the third in a row ends the thread.
    One that takes over `step_limit_s` ends them for their clients, and `ill` says so meanwhile.
    """

    def __init__(self, engine: Any, step_limit_s: float) -> None:
        self.stats: dict[str, Any] = engine.stats()
        self._engine, self._step_limit_s = engine, step_limit_s
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: dict[str, asyncio.Queue[Said]] = {}  # the loop's, by request
        self._held: set[str] = set()  # the thread's: requests of the engine
        self._stepping_since, self._failures, self._dead = float("inf"), 0, ""
        self._thread = threading.Thread(target=self._run, name="kernel_hub engine", daemon=True)

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

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watcher = self._loop.create_task(self._watch())
        self._thread.start()

    async def stop(self, timeout_s: float) -> None:
        """Ends what still runs with an error, then the thread."""
        self._watcher.cancel()
        self.end_all("The server is shutting down.", 503)
        self._asked.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)
        if self._thread.is_alive():
            logger.error("the engine's thread is left behind, a step of it does not end")

    async def deltas(self, requests: Sequence[Request]) -> AsyncGenerator[Delta | None, None]:
        """None once the engine has taken all, then deltas until all have ended; closed, aborts.

        Raises RequestError where the engine refuses one, ApiError where it fails or is stopped.
        """
        answers: asyncio.Queue[Said] = asyncio.Queue()
        self._answers.update((one.id, answers) for one in requests)
        self._asked.put(partial(self._submit, requests))
        num_left = len(requests)
        try:
            if self._dead:
                raise ApiError(500, self._dead, code="engine_error")
            while num_left:
                said = await answers.get()
                if isinstance(said, Exception):
                    raise said
                if said and said.finish_reason in ("error", "abort"):
                    why = said.error or "the engine gave the request up"
                    raise ApiError(500, why, code="engine_error")
                num_left -= bool(said and said.finish_reason)
                yield said
        finally:
            left = [one.id for one in requests if self._answers.pop(one.id, None)]
            self._asked.put(partial(self._abort, left))

    def end_all(self, why: str, status: int = 500) -> None:
        """Tells every client that its request has failed; leaving, they abort it."""
        for answers in set(self._answers.values()):
            answers.put_nowait(ApiError(status, why, code="engine_error"))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._step_limit_s / 4))
            if self.ill:
                self.end_all(self.ill)

    def _deliver(self, said: Iterable[tuple[str, Said]], stats: dict[str, Any]) -> None:
        self.stats = stats
        for name, one in said:
            if answers := self._answers.get(name):
                answers.put_nowait(one)
                if isinstance(one, Delta) and one.finish_reason:
                    del self._answers[name]

    # What follows runs on the engine's thread.

    def _tell(self, said: Iterable[tuple[str, Said]] = ()) -> None:
        self._call(self._deliver, said, self._engine.stats())

    def _call(self, call: Callable[..., None], *values: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(call, *values)

    def _run(self) -> None:
        try:
            while True:
                while not self._engine.has_work or not self._asked.empty():
                    if self._asked.empty():
                        self._tell()  # before it waits
                    if (ask := self._asked.get()) is None:
                        return self._abort(list(self._held))
                    ask()
                self._step()
        except Exception as error:
            logger.exception("the engine's thread ends")
            self._dead = f"the engine is given up: {failed(error)}"
            self._call(self.end_all, self._dead)

    def _submit(self, requests: Sequence[Request]) -> None:
        said: Said = None
        try:
            for one in requests:
                self._held.add(one.id)
                self._engine.submit(one)
        except RequestError as error:
            said = error
        except Exception as error:
            logger.exception("the engine failed to take a request")
            said = failed(error)
        self._tell([(requests[0].id, said)])

    def _abort(self, names: Sequence[str]) -> None:
        for name in self._held.intersection(names):
            self._engine.abort(name)
        self._held.difference_update(names)

    def _step(self) -> None:
        said: list[tuple[str, Said]]
        self._stepping_since = time.monotonic()
        try:
            deltas = self._engine.step()
            said = [(delta.request_id, delta) for delta in deltas]
            self._held -= {delta.request_id for delta in deltas if delta.finish_reason}
            self._failures = 0
        except Exception as error:
            logger.exception("a step of the engine failed")
            self._failures += 1
            if self._failures == MOST_FAILURES:
                raise
            said = [(name, failed(error)) for name in self._held]
            self._abort(list(self._held))
        finally:
            self._stepping_since = float("inf")
        self._tell(said)


def failed(error: Exception) -> ApiError:
    return ApiError(
        500, f"the engine failed: {type(error).__name__}: {error}", None, "engine_error"
    )
