"""OpenAI error objects: every failure a client can see is an ApiError."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

INVALID = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
SERVER = "server_error"


class ApiError(Exception):
    """One sentence for the client, with the HTTP status and OpenAI's four fields."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The error object; valid UTF-8 whatever the request held."""
        return {
            "error": {
                "message": _printable(self.message),
                "type": self.type,
                "param": _printable(self.param),
                "code": self.code,
            }
        }

    def response(self) -> Response:
        content = msgspec.json.encode(self.body())
        return Response(content, self.status, self.headers, media_type="application/json")


def _printable(text: str | None) -> str | None:
    return None if text is None else text.encode("utf-8", "replace").decode("utf-8")


def sentence(text: str) -> str:
    """An inner component's words as a sentence: capital letter, full stop."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request is wrong and `param` says where."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after: int | None = None) -> ApiError:
    """503: the server cannot answer now (starting, draining, failed)."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return ApiError(503, message, type=SERVER, code=code, headers=headers)


def internal() -> ApiError:
    return ApiError(
        500,
        "The server failed on this request; its log has the details under the request id.",
        type=SERVER,
        code="internal_error",
    )
