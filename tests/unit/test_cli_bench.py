"""The load generator against a scripted server, and the figures computed from samples."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.api import Address
from headrace.cli.bench import load as loads
from headrace.cli.bench import run
from headrace.cli.bench.client import Sample, completion
from headrace.cli.bench.load import Load, percentile, summarise
from headrace.cli.bench.record import commit, machine, record, versions
from headrace.cli.errors import CliError

Handler = Callable[[str, dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler, folder: Path) -> AsyncIterator[Address]:
    """An HTTP server on a Unix socket that hands each request to `handler(path, body, writer)`."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0)
        body = json.loads(await reader.readexactly(length) or b"{}")
        await handler(head.split()[1], body, writer)
        writer.close()

    path = str(folder / "s.sock")
    server = await asyncio.start_unix_server(connected, path)
    async with server:
        yield Address("http://localhost", path)


async def reply(writer: asyncio.StreamWriter, body: Any, status: str = "200 OK") -> None:
    data = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()


async def stream(writer: asyncio.StreamWriter, *events: Any, split: int = 0) -> None:
    """Events as one HTTP chunk each, or cut every `split` bytes."""
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    data = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]
    if split:
        whole = b"".join(data)
        data = [whole[i : i + split] for i in range(0, len(whole), split)]
    for piece in data:
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0.002)
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def text(piece: str) -> dict[str, Any]:
    return {"choices": [{"text": piece}]}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
}


def _one(handler: Handler, folder: Path) -> Sample:
    async def go() -> Sample:
        async with serving(handler, folder) as where:
            return await completion(where, {"prompt": "x"}, timeout=5.0)

    return asyncio.run(go())


@pytest.mark.parametrize("split", [0, 1, 7, 4096])
def test_a_stream_is_timed_by_chunks_that_carry_text(tmp_path: Path, split: int) -> None:
    async def handler(_path: str, _body: Any, writer: asyncio.StreamWriter) -> None:
        await stream(
            writer, text(""), text("a"), text("b"), text(""), text("c"), USAGE, split=split
        )

    sample = _one(handler, tmp_path)
    assert sample.ok, sample.error
    assert len(sample.chunks) == 3
    assert (sample.prompt_tokens, sample.output_tokens, sample.cached_tokens) == (7, 3, 4)
    assert sample.sent < sample.chunks[0] <= sample.chunks[1] <= sample.chunks[2] <= sample.finished


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((text("a"), {"error": {"message": "engine died"}}), "engine died"),
        ((text(""), USAGE), "no text"),
    ],
)
def test_streams_that_fail(tmp_path: Path, events: tuple[Any, ...], words: str) -> None:
    async def handler(_path: str, _body: Any, writer: asyncio.StreamWriter) -> None:
        await stream(writer, *events)

    assert words in _one(handler, tmp_path).error


def test_refusals_and_cut_connections_are_errors_in_the_sample(tmp_path: Path) -> None:
    async def refuse(_path: str, _body: Any, writer: asyncio.StreamWriter) -> None:
        await reply(writer, {"error": {"message": "busy"}}, "429 Too Many Requests")

    async def cut(_path: str, _body: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

    assert _one(refuse, tmp_path).error.startswith("HTTP 429")
    assert _one(cut, tmp_path).error
    nobody = asyncio.run(completion(Address("http://127.0.0.1:9"), {}, timeout=5.0))
    assert "Error" in nobody.error


class FakeServer:
    """Counts what is under way; tokenizes one token a word, or (without /tokenize) reports words + 5 as usage."""

    def __init__(self, tokenizes: bool = True) -> None:
        self.tokenizes = tokenizes
        self.prompts: list[Any] = []
        self.now = self.most = 0

    async def __call__(self, path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        if path == "/tokenize":
            if not self.tokenizes:
                return await reply(writer, {"error": {"message": "no"}}, "404 Not Found")
            words = body["prompt"].split()
            return await reply(writer, {"tokens": [hash(word) % 1000 for word in words]})
        self.now += 1
        self.most = max(self.most, self.now)
        self.prompts.append(body["prompt"])
        assert body.get("ignore_eos") is True or body["max_tokens"] == 2
        count = len(body["prompt"]) if self.tokenizes else len(body["prompt"].split()) + 5
        usage = {"prompt_tokens": count, "completion_tokens": body["max_tokens"]}
        await stream(writer, text("a"), text("b"), {"choices": [], "usage": usage})
        self.now -= 1


def _run(server: FakeServer, folder: Path, load: Load) -> dict[str, Any]:
    async def go() -> dict[str, Any]:
        async with serving(server, folder) as where:
            return await loads.run(where, "m", load)

    return asyncio.run(go())


def test_prompts_have_the_exact_length_and_differ(tmp_path: Path) -> None:
    server = FakeServer()
    load = Load(prompt_tokens=20, output_tokens=4, requests=6, concurrency=2, warmup=1)
    result = _run(server, tmp_path, load)
    assert [len(prompt) for prompt in server.prompts] == [20] * 7
    assert len({tuple(prompt) for prompt in server.prompts}) == 7
    assert result["requests"] == 6 and result["failed"] == 0
    assert result["prompt_tokens"] == 120 and result["output_tokens"] == 24
    assert server.most == 2


def test_without_tokenize_words_are_fitted_to_the_usage(tmp_path: Path) -> None:
    server = FakeServer(tokenizes=False)
    result = _run(server, tmp_path, Load(prompt_tokens=30, output_tokens=4, requests=2, warmup=0))
    assert result["prompt_tokens"] == 60


def test_shared_prefix_and_seed(tmp_path: Path) -> None:
    servers = [FakeServer(), FakeServer(), FakeServer()]
    load = Load(prompt_tokens=20, output_tokens=2, requests=2, warmup=0, shared_prefix=8)
    for server, seed in zip(servers, ("x", "x", "y"), strict=True):
        _run(server, tmp_path, Load(**{**_fields(load), "seed": seed}))
    first, second = servers[0].prompts
    assert first[:8] == second[:8] and first[8:] != second[8:]
    assert servers[0].prompts == servers[1].prompts != servers[2].prompts


def _fields(load: Load) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(load)


def test_arrivals_at_a_rate_are_not_held_back(tmp_path: Path) -> None:
    server = FakeServer()
    load = Load(prompt_tokens=4, output_tokens=2, requests=8, concurrency=0, rate=5000.0, warmup=0)
    assert _run(server, tmp_path, load)["requests"] == 8
    assert server.most > 2


def test_definitions() -> None:
    sample = Sample(
        sent=10.0, chunks=[10.5, 10.7, 11.3], finished=11.4, prompt_tokens=5, output_tokens=5
    )
    failed = Sample(sent=10.1, finished=10.2, error="boom")
    assert sample.ttft == pytest.approx(0.5)
    assert sample.tpot == pytest.approx(0.8 / 4)
    assert sample.e2e == pytest.approx(1.3)
    assert sample.itl == pytest.approx([0.2, 0.6])
    result = summarise([sample, failed])
    assert result["requests"] == 2 and result["failed"] == 1 and result["errors"] == ["boom"]
    assert result["output_tokens_per_s"] == pytest.approx(5 / 1.4, abs=0.01)
    assert result["ttft_ms"]["p50"] == pytest.approx(500)
    assert result["itl_ms"]["mean"] == pytest.approx(400)
    assert summarise([failed]) == {"requests": 1, "failed": 1, "errors": ["boom"]}
    single = Sample(sent=0.0, chunks=[1.0], finished=1.0, output_tokens=1)
    assert single.tpot is None and "tpot_ms" not in summarise([single])


def test_percentiles_interpolate() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0], 99) == 1.0
    assert percentile(list(range(101)), 99) == 99


def test_levels_have_prompts_of_their_own() -> None:
    base = run.load(128, 64, 4, 1, 0, "s")
    levels = run.levels(base, "1,8", 0.0)
    assert [(level.concurrency, level.requests) for level in levels.values()] == [(1, 4), (8, 8)]
    assert len({level.seed for level in levels.values()}) == 2
    assert next(iter(run.levels(base, "1", 2.5).values())).rate == 2.5
    assert run.load(1, 1, 1, 1, 0, "").seed != run.load(1, 1, 1, 1, 0, "").seed


@pytest.mark.parametrize("typed", ["", "a", "1,,2", "0", "-1"])
def test_wrong_lists_of_numbers(typed: str) -> None:
    with pytest.raises(CliError, match="--concurrency: expected numbers such as 1,4,16"):
        run.numbers("--concurrency", typed)


def test_a_record_says_where_it_comes_from() -> None:
    found = record("bench serve", {"a": 1}, [{"x": 2}])
    assert found["arguments"] == {"a": 1} and found["results"] == [{"x": 2}]
    assert found["machine"] == machine() and machine()["usable_cpus"] >= 1
    assert found["versions"] == versions() and versions()["headrace"]
    assert found["commit"] == commit()
    json.dumps(found)
