"""Body size limit, raw ASGI: refused from Content-Length alone, or at the first byte too many of a chunked body."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.engine.server.errors import ApiError

LINGER_SECONDS = 2.0


class BodyLimit:
    """Answers 413 and closes. For a moment what still comes is read and dropped: closing on a client that is
    sending would reset the connection and could destroy the answer before it is read."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = _content_length(scope)
        if declared is not None and declared > self._limit:
            await self._refuse(receive, send)
            return
        if declared is not None:  # the HTTP server holds the client to it
            await self._app(scope, receive, send)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._limit:
                    raise _BodyTooLarge
            return message

        try:
            await self._app(scope, limited, send)
        except _BodyTooLarge:
            await self._refuse(receive, send)

    async def _refuse(self, receive: Receive, send: Send) -> None:
        error = ApiError(
            413, f"The body is larger than {self._limit} bytes.", code="body_too_large"
        )
        response = error.response()
        response.headers["Connection"] = "close"
        await send(
            {
                "type": "http.response.start",
                "status": response.status_code,
                "headers": response.raw_headers,
            }
        )
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_drain(receive), LINGER_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _BodyTooLarge(Exception):
    """Passes through the application to the middleware; raised before any answer has begun."""


async def _drain(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None
