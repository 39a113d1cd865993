"""The routes, who may use them, and what is refused before an engine is asked."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .answers import Answer, check_model
from .bodies import Chat, Completion
from .grammars import Grammars
from .metrics import Metrics
from .refusals import TOLD, ApiError, told
from .transport import EventStream, events, read_json, unless_gone
from .worker import Worker


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
    """The endpoints of one engine, as ASGI."""

    def __init__(self, engine: Any, limits: ServerLimits, api_key: str | None) -> None:
        self._engine, self._limits = engine, limits
        self._worker = Worker(engine, limits.step_s)
        self._grammars = Grammars(engine)
        self._draining, self._num_read = False, 0
        self._key = api_key and f"Bearer {api_key}".encode()
        self.metrics = Metrics(self._worker)
        self._texts = ThreadPoolExecutor(1, "kernel_hub texts")
        self._created = int(time.time())
        self._app = Starlette(
            routes=[
                Route("/v1/completions", partial(self._answer, kind=Completion), methods=["POST"]),
                Route("/v1/chat/completions", partial(self._answer, kind=Chat), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._models),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            exception_handlers=dict.fromkeys((HTTPException, ClientDisconnect, *TOLD), said),
            lifespan=self._lifespan,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Who may come in, and a count of what went out."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        app: ASGIApp = self._app
        request, metrics, since, status = Request(scope), self.metrics, time.monotonic(), 499
        given = request.headers.get("authorization", "").encode()
        if self._key and scope["path"] != "/health" and not hmac.compare_digest(given, self._key):
            wrong = ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
            app = await said(request, wrong)

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        metrics.num_open += 1
        try:
            await app(scope, receive, counted)
        finally:
            metrics.num_open -= 1
            paths = (r.path for r in self._app.routes if r.matches(scope)[0] != Match.NONE)
            metrics.count(next(paths, "other"), status, since)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._worker.start()
        yield
        await self._worker.stop(5.0)
        self._texts.shutdown(wait=False, cancel_futures=True)

    async def drain(self) -> None:
        """Takes nothing new, waits for what runs, and ends what takes too long."""
        self._draining = True
        with anyio.move_on_after(self._limits.drain_s) as self.patience:
            while self.metrics.num_open:
                await asyncio.sleep(0.05)
        self._worker.end_all("The server is shutting down.", 503)

    def _unwell(self) -> str:
        return "it is shutting down" if self._draining else self._worker.ill

    async def _health(self, request: Request) -> Response:
        why = self._unwell()
        return JSONResponse({"status": why or "ok"}, 503 if why else 200)

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

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
            body = await read_json(request, self._limits.body_bytes, self._limits.read_s)
            asked = self._worker, self._engine, self._grammars, kind, body
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._texts, Answer, *asked)
        finally:
            self._num_read -= 1
        self._has_room()
        if not answer.streams:
            return JSONResponse(await unless_gone(request.receive, answer.whole()))
        pieces = answer.pieces()
        await anext(pieces)
        return EventStream(events(pieces))

    def _has_room(self) -> None:
        waiting = self._num_read + self._worker.waiting
        if waiting >= self._limits.waiting:
            said = f"{waiting} requests are waiting already."
            raise ApiError(429, said, code="rate_limit_exceeded")


async def said(request: Request, error: Exception) -> Response:
    """An error as OpenAI says it."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # that nobody reads
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")
    refused = told(error)
    return JSONResponse(refused.body, refused.status, refused.headers)
