"""Server-sent events: frames, and the response that sends them."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.engine.server.errors import ApiError, internal
from headrace.engine.server.flights import ClientGone, Flights

log = logging.getLogger("headrace.server")

DONE = b"data: [DONE]\n\n"

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # tells a proxy in between not to collect
}

_encoder = msgspec.json.Encoder()
encode = _encoder.encode


class StreamBroken(Exception):
    """Raised after an error event so that the HTTP server closes the connection; not a bug."""


def frame(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


class EventStream(Response):
    """The first frame is there before the status line goes out, so that a request which fails
    before its first token gets a real status; a later failure is one error event, then the connection closes."""

    def __init__(self, first: bytes, frames: AsyncGenerator[bytes, None], flights: Flights) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._first = first
        self._frames = frames
        self._flights = flights

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: ApiError | None = None
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await self._flights.run(receive, self._pump(send))
        except ClientGone:
            return
        except ApiError as failure:
            error = failure
        except Exception:
            log.exception("a stream failed")
            error = internal()
        finally:
            await self._frames.aclose()
        if error is not None:
            await send({"type": "http.response.body", "body": frame(error.body())})
            raise StreamBroken(error.message)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for data in self._frames:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": DONE})
