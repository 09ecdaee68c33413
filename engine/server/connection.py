"""A connection: uvicorn's HTTP protocol with bounds on what comes before a body."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.engine.server.errors import ApiError, invalid

MAX_HEAD_BYTES = 64 << 10  # request line and headers
HEAD_SECONDS = 75.0  # for them to arrive, from the connection's or the request's first moment


class Connection(HttpToolsProtocol):
    """Ends connections that send no request, or a head that is too slow, too large or not HTTP; the last two with an
    error object. Without it a client could hold a connection and fill memory for as long as it likes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._head_arrived()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                message = f"The request's head is larger than {MAX_HEAD_BYTES} bytes."
                self._refuse(ApiError(431, message, code="head_too_large"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(invalid("This is not a valid HTTP request.", code="invalid_http"))

    def _expect_head(self) -> None:
        self._head_arrived()
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _head_arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, error: ApiError) -> None:
        response = error.response()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nconnection: close\r\n"
        lines = [b"%b: %b\r\n" % header for header in response.raw_headers]
        self.transport.write(b"".join([head.encode(), *lines, b"\r\n", response.body]))
        self.transport.close()
