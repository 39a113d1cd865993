"""What a client is told instead of an answer: OpenAI's error objects."""

from __future__ import annotations

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from ...errors import PromptTooLongError, RequestError
from ..worker import EngineError

TYPES = {401: "authentication_error", 429: "rate_limit_error"}
MOST_ERRORS = 1000  # of a body, which are all looked at for the first
HEADERS = {
    401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"},
    429: {"Retry-After": "1"}, 503: {"Retry-After": "5"},
}  # fmt: skip


class ApiError(HTTPException):
    """An HTTP status, and beside it the error object."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(status, message, HEADERS.get(status))
        kind = "server_error" if status >= 500 else TYPES.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def refused(request: Request, error: Exception) -> Response:
    """The answer to anything that was raised on the way to another."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # that nobody reads
    if isinstance(error, HTTPException) and not isinstance(error, ApiError):
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")
    told = api_error(error)
    return JSONResponse(told.body, told.status_code, told.headers)


def api_error(error: Exception) -> ApiError:
    """As what clients are told of it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return ApiError(500, str(error), code="engine_error")
    if isinstance(error, RequestError):  # the engine's, or a chat template's
        is_long = isinstance(error, PromptTooLongError)
        kind = "context_length_exceeded" if is_long else "invalid_value"
        return ApiError(400, str(error), error.argument, kind)
    if not isinstance(error, ValidationError):
        return ApiError(500, f"The server failed: {type(error).__name__}.")
    if error.error_count() > MOST_ERRORS:
        return ApiError(400, f"The body is wrong in {error.error_count()} places.")
    # Of a body, the first thing that is wrong.
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, said = first["type"], first["msg"]
    # Of a union, the way names the type that was tried.
    way = (at for at in first["loc"] if kind == "extra_forbidden" or f"_{at}".isidentifier())
    param = ".".join(map(str, way)) or None
    known = {
        "json_invalid": (f"The body is not valid JSON: {said}.", None),
        "extra_forbidden": (f"Unrecognized request argument: {param}", "unknown_parameter"),
        "missing": (f"Missing required parameter: '{param}'.", "missing_required_parameter"),
        "together": (f"{said}.", None),
    }
    what = f"'{param}'" if param else "the body"
    message, code = known.get(kind, (f"Invalid value for {what}: {said}.", "invalid_value"))
    return ApiError(400, message, param, code)


CAUGHT = (HTTPException, ClientDisconnect, ValidationError, RequestError, EngineError, Exception)
HANDLERS = dict.fromkeys(CAUGHT, refused)
