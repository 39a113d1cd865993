"""What a client is told instead of an answer: OpenAI's error objects."""

from __future__ import annotations

from pydantic import ValidationError

from ...errors import PromptTooLongError, RequestError

TYPES = {401: "authentication_error", 429: "rate_limit_error"}
HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "5"},
}


class ApiError(Exception):
    """An HTTP status, and beside it the error object with its headers."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, HEADERS.get(status)
        kind = "server_error" if status >= 500 else TYPES.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


TOLD = (ApiError, ValidationError, RequestError, Exception)


def told(error: Exception) -> ApiError:
    """What is said of anything that was raised on the way to an answer."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _invalid(error)
    if isinstance(error, RequestError):  # the engine's, or a chat template's
        is_long = isinstance(error, PromptTooLongError)
        code = "context_length_exceeded" if is_long else "invalid_value"
        return ApiError(400, str(error), error.argument, code)
    return ApiError(500, f"The server failed: {type(error).__name__}.")


def _invalid(error: ValidationError) -> ApiError:
    """Of the first thing that is wrong with a body, what it is."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, said = first["type"], first["msg"]
    # Of a union, the way names the type that was tried.
    is_extra, way = kind == "extra_forbidden", first["loc"]
    param = ".".join(str(at) for at in way if is_extra or f"_{at}".isidentifier())
    known = {
        "json_invalid": (f"The body is not valid JSON: {said}.", None),
        "extra_forbidden": (f"Unrecognized request argument: {param}", "unknown_parameter"),
        "missing": (f"Missing required parameter: '{param}'.", "missing_required_parameter"),
    }
    message, code = known.get(kind, (f"Invalid value for '{param}': {said}.", "invalid_value"))
    return ApiError(400, message, param or None, code)
