"""A server in this process: routes, who may use them, what is counted, its socket and its end."""

from __future__ import annotations

import asyncio
import hmac
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import prometheus_client as prometheus
import uvicorn
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from ..grammars import Grammars
from ..worker import EngineError, Worker
from .answers import Answer, check_model
from .bodies import Chat, Completion
from .refusals import HANDLERS, ApiError, refused

CLOSE_S = 5  # for answers to end that were told to, and for the engine's thread
GAUGES = {"running", "waiting", "pages_used", "pages_total"}  # the engine's other numbers grow
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


@dataclass(frozen=True)
class ServerLimits:
    """What clients may ask for and how long they, or the engine, may take."""

    body_bytes: int = 8 << 20
    waiting: int = 256  # requests that do not run yet, beyond which others get 429
    read_s: float = 30.0  # for a body
    write_s: float = 30.0  # for a client to take a piece of its answer
    step_s: float = 120.0  # for a step of the engine
    drain_s: float = 30.0  # for what runs when the server is told to stop


class Server(uvicorn.Server):
    """uvicorn's, with the routes of one engine; `num_open` is how many requests are answered.

    It drains with its socket open at the first signal, and hurries at the next.
    """

    def __init__(
        self, engine: Any, limits: ServerLimits, api_key: str | None, ready: Callable[[Any], None]
    ) -> None:
        super().__init__(uvicorn.Config(
            self, http="h11", ws="none", lifespan="off", log_level="warning", access_log=False,
            server_header=False, timeout_graceful_shutdown=CLOSE_S, timeout_keep_alive=65,
        ))  # fmt: skip
        self._engine, self._limits, self._grammars = engine, limits, Grammars(engine)
        self.worker, self._ready = Worker(engine, limits.step_s), ready
        self.num_open, self._num_read, self._num_ends, self._drain_ends = 0, 0, 0, 0.0
        self._key = api_key and f"Bearer {api_key}".encode()
        self._texts = ThreadPoolExecutor(1, "kernel_hub texts")
        self._created, self._registry = int(time.time()), prometheus.CollectorRegistry()
        self._registry.register(self)
        self._counter = prometheus.Counter(
            "kernel_hub_requests", "Requests by route and status.", ["route", "status"],
            registry=self._registry,
        )  # fmt: skip
        self._seconds = prometheus.Histogram(
            "kernel_hub_request_seconds", "From the head of a request to the end of its answer.",
            ["route"], buckets=SECONDS, registry=self._registry,
        )  # fmt: skip
        self._app = Starlette(exception_handlers=HANDLERS, routes=[
            Route("/v1/completions", partial(self._answer, kind=Completion), methods=["POST"]),
            Route("/v1/chat/completions", partial(self._answer, kind=Chat), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ])  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Who may come in; what they leave behind; a count of what went out, 499: nothing."""
        request, since, status, app = Request(scope), time.monotonic(), 499, self._app
        given = request.headers.get("authorization", "").encode("latin-1")
        if self._key and scope["path"] != "/health" and not hmac.compare_digest(given, self._key):
            wrong = ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
            app = await refused(request, wrong)

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        self.num_open, scope["asked"] = self.num_open + 1, []
        try:
            with anyio.CancelScope() as scope["until_gone"]:
                await app(scope, receive, counted)
        finally:
            self.num_open -= 1
            self.worker.leave(scope["asked"])
            paths = (r.path for r in self._app.routes if r.matches(scope)[0] != Match.NONE)
            route = next(paths, "other")
            self._counter.labels(route, str(status)).inc()
            self._seconds.labels(route).observe(time.monotonic() - since)

    async def _answer(self, request: Request, kind: type[Completion] | type[Chat]) -> Response:
        self._admit()
        self._num_read += 1
        try:
            body = await self._body(request)
            request.scope["watch"] = asyncio.create_task(_watch(request))
            loop, made_of = asyncio.get_running_loop(), (self._engine, self._grammars, kind, body)
            answer = await loop.run_in_executor(self._texts, Answer, *made_of)
        finally:
            self._num_read -= 1
        self._admit()
        request.scope["asked"] = answer.requests
        deltas = self.worker.deltas(answer.requests)
        await anext(deltas)  # the engine has taken them
        if answer.asked.stream:
            return StreamingResponse(answer.events(deltas), media_type="text/event-stream")
        return JSONResponse(answer.whole([delta async for delta in deltas if delta]))

    def _admit(self) -> None:
        """Raises ApiError while there is no answer to be had."""
        if self._unwell:
            raise ApiError(503, f"The server takes no requests: {self._unwell}.")
        waiting = self._num_read + self.worker.waiting
        if waiting >= self._limits.waiting:
            said = f"{waiting} requests are waiting already."
            raise ApiError(429, said, code="rate_limit_exceeded")

    async def _body(self, request: Request) -> bytes:
        """Raises ApiError where it does not say that it is JSON, or takes too much."""
        limits, body = self._limits, bytearray()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Any other type a page of another site could make a browser send.
            raise ApiError(415, "The body must be JSON: send 'Content-Type: application/json'.")
        try:
            with anyio.fail_after(limits.read_s):
                async for part in request.stream():
                    body += part
                    if len(body) > limits.body_bytes:
                        raise ApiError(413, f"The body is larger than {limits.body_bytes} bytes.")
        except TimeoutError:
            raise ApiError(408, f"The body took over {limits.read_s:g} s to come.") from None
        return bytes(body)

    async def _models(self, request: Request) -> Response:
        name = request.path_params.get("name")
        check_model(self._engine, name or self._engine.name)
        model = {"id": self._engine.name, "object": "model", "created": self._created,
                 "owned_by": "kernel_hub", "max_model_len": self._engine.max_model_len}  # fmt: skip
        return JSONResponse(model if name else {"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": self._unwell or "ok"}, 503 if self._unwell else 200)

    async def _metrics(self, request: Request) -> Response:
        text = prometheus.generate_latest(self._registry)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

    def collect(self) -> Iterator[Metric]:
        """The engine's numbers after its last step, as prometheus-client asks for them."""
        for name, value in self.worker.stats.items():
            kind: Any = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            yield kind(f"kernel_hub_engine_{name}", f"{name} of the engine", value=value)

    @property
    def _unwell(self) -> str:
        return "it is shutting down" if self._num_ends else self.worker.ill

    def drain(self) -> None:
        """From any thread: take nothing new, answer what runs, then end; asked again, end it."""
        self._num_ends += 1

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.started and self._num_ends < 2:
            self.drain()
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready(self)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: ends what an ill engine holds up, and once told to, the server."""
        if self.worker.ill:
            self.worker.fail_all(EngineError(self.worker.ill))
        if self._num_ends:
            now = time.monotonic()
            self._drain_ends = self._drain_ends or now + self._limits.drain_s
            if self._num_ends > 1 or not self.num_open or now > self._drain_ends:
                said = "The server is shutting down."
                self.worker.fail_all(ApiError(503, said, code="engine_error"))
                self.should_exit = True
        return bool(await super().on_tick(counter))


async def _watch(request: Request) -> None:
    """Ends the answering once the client is gone; or after it, which does nothing."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    request.scope["until_gone"].cancel()


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
    server, before = Server(engine, limits, api_key, ready), sys.getswitchinterval()
    # The engine's thread, back from the GPU, would wait 5 ms for one that writes JSON.
    sys.setswitchinterval(2e-4)
    try:
        server.run(sockets=[listener])
    finally:
        server.worker.stop(CLOSE_S)
        sys.setswitchinterval(before)
