"""A server in a thread of the test, on a free port of the loopback, and what is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from byte_engine import ByteEngine

KEY = "sk-by-lot"


class Served:
    """One that runs. `client()` is httpx's, `openai()` and `async_openai()` are OpenAI's."""

    def __init__(
        self, engine: Any, server: Any, loop: Any, port: int, thread: threading.Thread
    ) -> None:
        self.engine, self.server, self.loop, self.thread = engine, server, loop, thread
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.tasks_before = self.num_tasks()

    def client(self, **options: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.Client(base_url=self.url, timeout=30, headers=headers, **options)

    def openai(self, **options: Any) -> Any:
        import openai

        options = {"max_retries": 0, "timeout": 30, "api_key": KEY, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def async_openai(self, **options: Any) -> Any:
        import openai

        options = {"max_retries": 0, "timeout": 60, "api_key": KEY, **options}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **options)

    def num_tasks(self) -> int:
        async def count() -> int:
            return len(asyncio.all_tasks())

        return asyncio.run_coroutine_threadsafe(count(), self.loop).result(10)

    def until(self, holds: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        """What holds once must go on to: between two looks a busy machine lets seconds pass."""
        ends = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < ends, f"not within {timeout_s} s: {what}"
            time.sleep(0.01)

    def is_idle(self) -> bool:
        """Nothing of any request is left: none runs, no page is used, no task waits."""
        worker, stats = self.server.worker, self.server.worker.stats
        used = stats["running"] + stats["waiting"] + stats["pages_used"]
        of_server = len(worker._answers) + len(worker._held) + self.server.num_open
        return not used and not of_server and not self.engine.has_work

    def settles(self) -> None:
        self.until(self.is_idle, "nothing runs, no page is used, nobody is answered")
        # Open connections have no task; those of answers are gone.
        self.until(lambda: self.num_tasks() <= self.tasks_before, "no task of an answer is left")


@contextlib.contextmanager
def served(engine: Any = None, api_key: str | None = KEY, **limits: Any) -> Iterator[Served]:
    """Runs until the block ends, then drains, and all of it must be gone in time."""
    from kernel_hub.engine.server import serve
    from kernel_hub.engine.server.serve import ServerLimits

    engine = engine or ByteEngine()
    listener = serve.bound("127.0.0.1", 0, ServerLimits(**limits))
    port = listener.getsockname()[1]
    made: list[Any] = []
    failed: list[BaseException] = []

    def ready(server: Any) -> None:
        made.append((server, asyncio.get_running_loop()))

    def run() -> None:
        try:
            serve.serve(engine, listener, ServerLimits(**limits), api_key, ready)
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ends = time.monotonic() + 60
    while not made:
        assert thread.is_alive() and time.monotonic() < ends, f"the server does not start: {failed}"
        time.sleep(0.01)
    here = Served(engine, *made[0], port, thread)
    try:
        yield here
    finally:
        if thread.is_alive():
            here.server.drain()
        thread.join(60)
        assert not thread.is_alive(), "the server does not end"
    assert not failed
