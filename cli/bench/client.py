"""One streamed completion over asyncio, timed. Much lighter than a general client: on one machine the load generator
takes its processor time from the server it measures."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import httptools

from headrace.cli.api import Address
from headrace.cli.errors import RUNTIME, CliError

READ_BYTES = 1 << 16


@dataclass(slots=True)
class Sample:
    """One request. Times are time.perf_counter() seconds; `chunks` are the arrivals of chunks that carry text."""

    sent: float
    chunks: list[float] = field(default_factory=list)
    finished: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first text."""
        return self.chunks[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None for answers of one token."""
        if self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        """Seconds from sending to the last text."""
        return self.chunks[-1] - self.sent

    @property
    def itl(self) -> list[float]:
        """Gaps between chunks that follow each other, in seconds."""
        return [b - a for a, b in pairwise(self.chunks)]


class _Reply:
    """Collects one response for httptools: status, and server-sent events or a plain body."""

    def __init__(self) -> None:
        self.done = False
        self.arrivals: list[tuple[float, bytes]] = []
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, data: bytes) -> None:
        self.arrivals.append((time.perf_counter(), data))

    def on_message_complete(self) -> None:
        self.done = True

    @property
    def status(self) -> int:
        return int(self.parser.get_status_code())

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.arrivals)


async def _exchange(where: Address, path: str, body: Mapping[str, Any] | None) -> _Reply:
    """POST `body` as JSON, or GET when there is none, on a connection of its own."""
    url = urlsplit(where.url)
    if where.uds:
        reader, writer = await asyncio.open_unix_connection(where.uds)
    else:
        secure = url.scheme == "https"
        reader, writer = await asyncio.open_connection(
            url.hostname,
            url.port or (443 if secure else 80),
            ssl=ssl.create_default_context() if secure else None,
        )
    try:
        method, data = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        head = {
            "Host": url.netloc,
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            "Connection": "close",
            **where.headers(),
        }
        lines = [
            f"{method} {url.path.rstrip('/')}{path} HTTP/1.1",
            *(f"{k}: {v}" for k, v in head.items()),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        await writer.drain()
        reply = _Reply()
        while not reply.done and (piece := await reader.read(READ_BYTES)):
            reply.parser.feed_data(piece)
        return reply
    finally:
        writer.close()


async def completion(where: Address, body: Mapping[str, Any], timeout: float) -> Sample:
    """Send one streamed completion and time it; a failure is an error in the sample, never an exception."""
    sample = Sample(time.perf_counter())
    try:
        reply = await asyncio.wait_for(_exchange(where, "/v1/completions", body), timeout)
        _read(reply, sample)
    except (
        OSError,
        ValueError,
        KeyError,
        httptools.HttpParserError,
        asyncio.TimeoutError,
    ) as error:
        sample.error = f"{type(error).__name__}: {error}".rstrip(": ")
    sample.finished = time.perf_counter()
    return sample


def _read(reply: _Reply, sample: Sample) -> None:
    """Fill the sample from the events, each with the time its last byte arrived."""
    if not reply.status:
        sample.error = "the connection closed before an answer"
        return
    if reply.status != 200:
        sample.error = f"HTTP {reply.status}: {reply.body[:300].decode(errors='replace')}"
        return
    buffer = b""
    for arrived, data in reply.arrivals:
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            payload = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and payload != b"[DONE]":
                _event(json.loads(payload), arrived, sample)
    if not sample.error and not sample.chunks:
        sample.error = "no text in the answer"
    sample.output_tokens = sample.output_tokens or len(sample.chunks)


def _event(event: dict[str, Any], arrived: float, sample: Sample) -> None:
    if "error" in event:
        sample.error = str(event["error"].get("message", event["error"]))
    usage = event.get("usage") or {}
    if usage:
        sample.prompt_tokens = usage["prompt_tokens"]
        sample.output_tokens = usage["completion_tokens"]
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if any(choice.get("text") for choice in event.get("choices", ())):
        sample.chunks.append(arrived)


async def call(
    where: Address, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """A plain JSON call; None when the server has no such route. CliError for anything else that is not 200."""
    try:
        reply = await _exchange(where, path, body)
    except OSError as error:
        raise CliError(f"no server answers at {where} ({error})", RUNTIME) from None
    if reply.status in (404, 405, 501):
        return None
    if reply.status != 200:
        raise CliError(
            f"{path} answered HTTP {reply.status}: {reply.body[:300].decode(errors='replace')}",
            RUNTIME,
        )
    return dict(json.loads(reply.body))
