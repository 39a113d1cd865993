"""What a client is told instead of an answer: OpenAI's error objects."""

from __future__ import annotations

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
