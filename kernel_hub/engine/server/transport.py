"""How bytes come and go: bodies up to a size, events at a client's pace, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .refusals import ApiError


async def read_json(request: Request, most_bytes: int, timeout_s: float) -> bytes:
    """The body, which says that it is JSON. Raises ApiError where it is not or takes too much."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        # Any other type a page of another site could make a browser send.
        raise ApiError(415, "The body must be JSON: send 'Content-Type: application/json'.")
    body = bytearray()
    try:
        with anyio.fail_after(timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > most_bytes:
                    raise ApiError(413, f"The body is larger than {most_bytes} bytes.")
    except TimeoutError:
        raise ApiError(408, f"The body took over {timeout_s:g} s to come.") from None
    return bytes(body)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
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
        with contextlib.suppress(ClientDisconnect):
            async with contextlib.aclosing(self.body_iterator):
                await unless_gone(receive, self.stream_response(send))


async def events(pieces: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[str, None]:
    """What is sent of `pieces`; an error on the way is the last of it."""
    last = "[DONE]"
    async with contextlib.aclosing(pieces):
        try:
            async for piece in pieces:
                yield f"data: {json.dumps(piece, separators=(',', ':'))}\n\n"
        except ApiError as error:
            last = json.dumps(error.body)
    yield f"data: {last}\n\n"
