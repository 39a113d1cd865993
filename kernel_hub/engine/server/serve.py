"""A server in this process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from .app import ServerLimits, Service

CLOSE_S = 5  # for answers to end that were told to


class Server(uvicorn.Server):
    """uvicorn's, which drains with its socket open at the first signal, and hurries at the next."""

    def __init__(self, service: Service, ready: Callable[[Server], None]) -> None:
        config = uvicorn.Config(
            service, http="h11", ws="none", lifespan="on", log_level="warning",
            access_log=False, server_header=False, timeout_graceful_shutdown=CLOSE_S,
            timeout_keep_alive=65,
        )  # fmt: skip
        super().__init__(config)
        self.service, self._ready = service, ready
        self._num_asked = 0
        self._drained: asyncio.Task[None] | None = None

    def drain(self) -> None:
        """From any thread: answer what runs, then end; asked again, end what runs."""
        self._num_asked += 1

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready(self)

    async def on_tick(self, counter: int) -> bool:
        if self._num_asked and not self._drained:
            self._drained = asyncio.create_task(self.service.drain())
        elif self._num_asked > 1:
            self.service.patience.cancel()
        self.should_exit |= bool(self._drained and self._drained.done())
        return bool(await super().on_tick(counter))

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.started and self._num_asked < 2:
            self.drain()
        else:
            super().handle_exit(sig, frame)


def bound(host: str, port: int, limits: ServerLimits) -> socket.socket:
    """A socket of that address, port 0: any; it refuses clients until `serve` listens.

    Connections that take nothing for `limits.write_s` are cut. Raises OSError.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        timeout_ms = int(1000 * limits.write_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    listener.bind(address)
    return listener


def serve(
    engine: Any, listener: socket.socket, limits: ServerLimits, api_key: str | None = None,
    ready: Callable[[Server], None] = lambda server: None,
) -> None:  # fmt: skip
    """Answers on `listener` until SIGTERM or SIGINT, then drains; `ready` is called before."""
    # The engine's thread, back from the GPU, would wait 5 ms for one that writes JSON.
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    try:
        Server(Service(engine, limits, api_key), ready).run(sockets=[listener])
    finally:
        sys.setswitchinterval(before)
