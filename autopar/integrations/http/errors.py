"""Error responses of OpenAI's API: a status, and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

KINDS = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}  # status -> OpenAI's type


class ApiError(Exception):
    """What a client gets. ``param``: the field of the request that is wrong. ``code``: OpenAI's name of the error,
    which programs compare, such as "context_length_exceeded"."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
