"""Clients of a flood: raw sockets and the official client, each with a random request and a random way to leave."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import openai

WORDS = [
    "river",
    "stone",
    "Zürich",
    "東京",
    "😀",
    "the",
    "of",
    "light",
    "green",
    "if",
    "while",
    "_x",
    "42",
    ",",
]
STOPS = ["the", "\n\n", ". ", "zz top", "😀", "e", "and then"]
# How a client leaves: it reads to the end, closes in mid-stream in order or with a reset, goes before the first
# byte, or sends half a request.
WAYS = (*["read"] * 11, "close", "close", "close", "reset", "reset", "gone", "gone", "half", "slow")


@dataclass
class Tally:
    """What became of the requests."""

    ways: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  # error codes, of statuses and of events
    cut: int = 0  # connections that ended without any word


def random_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """(path, body) of a streaming request."""
    text = " ".join(rng.choices(WORDS, k=rng.choice((1, 3, 10, 40, 120))))
    body: dict[str, Any] = {"stream": True, "max_tokens": rng.randint(1, 10)}
    if rng.random() < 0.4:
        body["stop"] = rng.sample(STOPS, rng.randint(1, 4))
    if rng.random() < 0.2:
        body["n"] = rng.randint(2, 3)
    if rng.random() < 0.3:
        body["seed"] = rng.randrange(100)
    if rng.random() < 0.3:
        body["ignore_eos"] = True
    if rng.random() < 0.3:
        body["stream_options"] = {"include_usage": True}
    body["temperature"] = rng.choice((0, 0.7, 1.5))
    if rng.random() < 0.5:
        return "/v1/completions", {**body, "prompt": text, "echo": rng.random() < 0.3}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}


def http_bytes(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + data


async def raw_client(port: int, rng: random.Random, tally: Tally) -> None:
    """One request over a socket of its own."""
    path, body = random_body(rng)
    way = rng.choice(WAYS)
    tally.ways[way] += 1
    await asyncio.sleep(rng.random())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = http_bytes(path, body)
    try:
        writer.write(data[: len(data) // 2] if way == "half" else data)
        await writer.drain()
        if way in ("gone", "half"):
            await asyncio.sleep(rng.random() * 0.2)
        elif way in ("close", "reset"):
            await reader.read(rng.randint(1, 2000))
        else:
            answer = await _read(reader, slowly=way == "slow")
            check_answer(answer, body, tally)
    except ConnectionError:
        tally.cut += 1
    finally:
        if way == "reset":
            linger = struct.pack("ii", 1, 0)  # close sends RST instead of FIN
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()


async def _read(reader: asyncio.StreamReader, slowly: bool) -> bytes:
    pieces = []
    while piece := await reader.read(200 if slowly else 1 << 16):
        pieces.append(piece)
        if slowly:
            await asyncio.sleep(0.05)
    return b"".join(pieces)


def check_answer(answer: bytes, body: dict[str, Any], tally: Tally) -> None:
    """A whole stream, an error object, or a stream that ends with one error event; anything else is a failure."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    if not head:
        tally.cut += 1
        return
    status = int(head.split()[1])
    if status != 200:
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        assert len(rest) == length, answer
        tally.errors[json.loads(rest)["error"]["code"]] += 1
        return
    assert b"text/event-stream" in head
    events = [block for block in dechunk(rest).decode().split("\n\n") if block]
    assert all(event.startswith("data: ") for event in events), answer
    last = events.pop()
    values = [json.loads(event[6:]) for event in events]
    if last != "data: [DONE]":
        tally.errors[json.loads(last[6:])["error"]["code"]] += 1
        return
    assert rest.endswith(b"0\r\n\r\n"), answer  # the chunked body is closed, too
    _check_choices(values, body, tally)


def _check_choices(chunks: list[dict[str, Any]], body: dict[str, Any], tally: Tally) -> None:
    wants_usage = "stream_options" in body
    assert [not chunk["choices"] for chunk in chunks[-1:]] == [wants_usage]
    texts: Counter[int] = Counter()
    text = dict.fromkeys(range(body.get("n", 1)), "")
    reasons: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            at = choice["index"]
            assert at not in reasons, "a chunk after the last one of its choice"
            texts[at] += 1
            text[at] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            if choice["finish_reason"]:
                reasons[at] = choice["finish_reason"]
    assert reasons.keys() == text.keys(), (body, chunks)
    tally.reasons.update(reasons.values())
    echo = len(body["prompt"]) if body.get("echo") else 0
    for shown in text.values():
        found = [stop for stop in body.get("stop", ()) if stop in shown[echo:]]
        assert not found, (body, shown)
    if wants_usage:
        assert 0 < chunks[-1]["usage"]["completion_tokens"] <= body["max_tokens"] * len(text)


def dechunk(data: bytes) -> bytes:
    """The content of a chunked body; of one that was cut, what there is."""
    content = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            break
        content += data[:length]
        data = data[length + 2 :]
    return content


async def sdk_client(client: openai.AsyncOpenAI, rng: random.Random, tally: Tally) -> None:
    """The official client; some leave in mid-stream."""
    leaves = rng.random() < 0.4
    tally.ways["sdk leaves" if leaves else "sdk reads"] += 1
    await asyncio.sleep(rng.random())
    try:
        stream = await client.chat.completions.create(
            model="flood",
            messages=[{"role": "user", "content": " ".join(rng.choices(WORDS, k=8))}],
            max_tokens=rng.randint(1, 12),
            stream=True,
        )
        reasons = []
        async for chunk in stream:
            reasons.append(chunk.choices[0].finish_reason)
            if leaves and len(reasons) == 3:
                await stream.close()
                return
        assert reasons[-1] and not any(reasons[:-1])
        tally.reasons[reasons[-1]] += 1
    except openai.APIStatusError as error:
        tally.errors[str(error.code)] += 1
    except openai.APIConnectionError:
        tally.cut += 1
    except openai.APIError as error:  # an error event in the stream
        tally.errors[str(error.code)] += 1


async def flood(port: int, count: int, seed: int) -> Tally:
    """`count` concurrent streaming requests, a tenth of them from the official client."""
    tally = Tally()
    rng = random.Random(seed)
    client = openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120
    )
    async with client:
        work = [
            sdk_client(client, random.Random(rng.random()), tally)
            if at % 10 == 0
            else raw_client(port, random.Random(rng.random()), tally)
            for at in range(count)
        ]
        await asyncio.gather(*work)
    return tally
