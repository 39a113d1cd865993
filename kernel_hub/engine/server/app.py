"""The routes, who may use them, what is refused before an engine is asked, and what is counted."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .answers import Answer, check_model
from .bodies import Chat, Completion
from .grammars import Grammars
from .refusals import HANDLERS, ApiError, refused
from .worker import Worker

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


class Service:
    """The endpoints of one engine, as ASGI; `num_open` is how many requests are being answered."""

    def __init__(self, engine: Any, limits: ServerLimits, api_key: str | None) -> None:
        self._engine, self._limits = engine, limits
        self._worker, self._grammars = Worker(engine, limits.step_s), Grammars(engine)
        self._draining, self.num_open, self._num_read = False, 0, 0
        self._key = api_key and f"Bearer {api_key}".encode()
        self._texts = ThreadPoolExecutor(1, "kernel_hub texts")
        self._created, self._registry = int(time.time()), CollectorRegistry()
        self._registry.register(self)
        self._counter = Counter("kernel_hub_requests", "Requests by route and status.",
                                ["route", "status"], registry=self._registry)  # fmt: skip
        self._seconds = Histogram(
            "kernel_hub_request_seconds", "From the head of a request to the end of its answer.",
            ["route"], buckets=SECONDS, registry=self._registry,
        )  # fmt: skip
        self._app = Starlette(
            routes=[
                Route("/v1/completions", partial(self._answer, kind=Completion), methods=["POST"]),
                Route("/v1/chat/completions", partial(self._answer, kind=Chat), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._models),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            exception_handlers=HANDLERS,
            lifespan=self._lifespan,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Who may come in, and a count of what went out: 499 where the client went away."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        app: ASGIApp = self._app
        request, since, status = Request(scope), time.monotonic(), 499
        given = request.headers.get("authorization", "").encode()
        if self._key and scope["path"] != "/health" and not hmac.compare_digest(given, self._key):
            wrong = ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
            app = await refused(request, wrong)

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        self.num_open += 1
        try:
            await app(scope, receive, counted)
        finally:
            self.num_open -= 1
            paths = (r.path for r in self._app.routes if r.matches(scope)[0] != Match.NONE)
            route = next(paths, "other")
            self._counter.labels(route, str(status)).inc()
            self._seconds.labels(route).observe(time.monotonic() - since)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._worker.start()
        yield
        await self._worker.stop(5.0)
        self._texts.shutdown(wait=False, cancel_futures=True)

    async def drain(self) -> None:
        """Takes nothing new, waits for what runs, and ends what takes too long."""
        self._draining = True
        with anyio.move_on_after(self._limits.drain_s) as self.patience:
            while self.num_open:
                await asyncio.sleep(0.05)
        self._worker.end_all("The server is shutting down.", 503)

    def _unwell(self) -> str:
        return "it is shutting down" if self._draining else self._worker.ill

    async def _health(self, request: Request) -> Response:
        why = self._unwell()
        return JSONResponse({"status": why or "ok"}, 503 if why else 200)

    def collect(self) -> Iterator[Metric]:
        """The engine's numbers after its last step, as prometheus-client asks for them."""
        for name, value in self._worker.stats.items():
            kind: Any = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            yield kind(f"kernel_hub_engine_{name}", f"{name} of the engine", value=value)

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _models(self, request: Request) -> Response:
        name = request.path_params.get("name")
        check_model(self._engine, name or self._engine.name)
        model = {"id": self._engine.name, "object": "model", "created": self._created,
                 "owned_by": "kernel_hub", "max_model_len": self._engine.max_model_len}  # fmt: skip
        return JSONResponse(model if name else {"object": "list", "data": [model]})

    async def _answer(self, request: Request, kind: type[Completion] | type[Chat]) -> Response:
        if why := self._unwell():
            raise ApiError(503, f"The server takes no requests: {why}.")
        self._has_room()
        self._num_read += 1
        try:
            body = await self._body(request)
            asked = self._worker, self._engine, self._grammars, kind, body
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._texts, Answer, *asked)
        finally:
            self._num_read -= 1
        self._has_room()
        if not answer.asked.stream:
            return JSONResponse(await unless_gone(request.receive, answer.whole()))
        events = answer.events()
        await anext(events)
        return EventStream(events)

    def _has_room(self) -> None:
        waiting = self._num_read + self._worker.waiting
        if waiting >= self._limits.waiting:
            said = f"{waiting} requests are waiting already."
            raise ApiError(429, said, code="rate_limit_exceeded")

    async def _body(self, request: Request) -> bytes:
        """Raises ApiError where it does not say that it is JSON, or takes too much."""
        limits, body = self._limits, bytearray()
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
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


async def unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """What `work` gives; cancelled, and ClientDisconnect raised, once the client is gone."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events, until the client is gone; their generator ends with it."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            async with aclosing(self.body_iterator):
                await unless_gone(receive, self.stream_response(send))
