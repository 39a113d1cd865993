"""A server in this process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from .app import Limits, Service

CLOSE_S = 5.0  # for answers to end that were told to


class Server(uvicorn.Server):
    """uvicorn's, which at the first signal drains with its socket open, at the second goes."""

    def __init__(self, service: Service, limits: Limits) -> None:
        config = uvicorn.Config(
            service.app(), http="h11", ws="none", lifespan="on", log_level="warning",
            access_log=False, server_header=False, timeout_graceful_shutdown=int(CLOSE_S),
            timeout_keep_alive=65,
        )  # fmt: skip
        super().__init__(config)
        self._service = service
        self._drained: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def drain(self) -> None:
        """From any thread: answers what it has, then ends."""
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        if self._drained is None:
            self._drained = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        await self._service.drain()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self._drained is None and not self.should_exit:
            self.drain()
        else:
            super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any that is free. Raises OSError."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=512)
    return listener


def serve(
    engine: Any, listener: socket.socket, limits: Limits, api_key: str | None = None,
    ready: Callable[[Server], None] = lambda server: None,
) -> None:  # fmt: skip
    """Answers on `listener` until SIGTERM or SIGINT, then drains; a second one ends it at once."""
    # A thread that comes back from the GPU would wait 5 ms for one that writes JSON.
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    server = Server(Service(engine, limits, api_key), limits)
    ready(server)
    try:
        server.run(sockets=[listener])
    finally:
        sys.setswitchinterval(before)
