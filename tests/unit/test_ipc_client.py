"""ZmqEngineClient and EngineServer against each other, without an engine: the test plays it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq

from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.step import TokenLogprobs
from headrace.engine.ipc.client import EngineDead
from headrace.engine.ipc.messages import (
    Abort,
    Call,
    CallReply,
    EngineFailed,
    EngineProgress,
    EngineReady,
    Outputs,
    RequestOutput,
    Shutdown,
    Stats,
    Submit,
)
from headrace.engine.ipc.server import Audience, EngineServer
from headrace.engine.ipc.zmq_client import ZmqEngineClient, merge

READY = EngineReady("d", "device", "f32", "f32", 64, 16, 1, 1, 1, 1, 1, 1, [], {})


class Played:
    """The engine's side: what it has heard, and a way to wait for more."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server
        self.heard: list = []
        self.client = b""

    async def hear(self, kind: type):
        """The next message of a kind, others are kept in `heard`."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            for client, message in self.server.receive():
                self.client = client
                self.heard.append(message)
            for message in self.heard:
                if isinstance(message, kind):
                    self.heard.remove(message)
                    return message
            await asyncio.sleep(0.002)
        raise AssertionError(f"no {kind.__name__} came")

    def tell(self, message) -> None:
        self.server.send(self.client, message)


def play(
    tmp_path: Path,
    scene: Callable[[ZmqEngineClient, Played], Awaitable[None]],
    process=None,
) -> None:
    async def run() -> None:
        address = f"ipc://{tmp_path}/e"
        server = EngineServer(address)
        client = ZmqEngineClient(address, process)
        await client.start()
        try:
            await asyncio.wait_for(scene(client, Played(server)), 20)
        finally:
            await client.close()
            server.close()

    asyncio.run(run())


def submit(name: str = "a") -> Submit:
    return Submit(name, b"\0\0\0\0", SamplingParams())


def test_outputs_that_wait_are_merged(tmp_path: Path):
    async def scene(client: ZmqEngineClient, engine: Played) -> None:
        outputs = client.generate(submit())
        first = asyncio.ensure_future(anext(outputs))
        await engine.hear(Submit)
        engine.tell(Outputs([RequestOutput("a", [0], cached_tokens=5, queued_s=0.5)]))
        assert (await first).token_ids == [0]
        for i in range(1, 1000):  # nobody reads meanwhile
            last = {"finish_reason": "stop", "stop_token_id": i} if i == 999 else {}
            engine.tell(Outputs([RequestOutput("a", [i], **last)]))
        engine.tell(Stats(steps=7))
        while client.stats.steps != 7:
            await asyncio.sleep(0.002)
        rest = [output async for output in outputs]
        assert len(rest) == 1
        assert rest[0].token_ids == list(range(1, 1000))
        assert (rest[0].finish_reason, rest[0].stop_token_id) == ("stop", 999)
        assert client.unfinished == 0

    play(tmp_path, scene)


def test_merging_keeps_what_only_the_first_output_carries():
    entry = TokenLogprobs(1, -1.0, 1, [], [])
    first = RequestOutput("a", [1], [entry], [entry, entry], cached_tokens=4, queued_s=2.0)
    merge(first, RequestOutput("a", [2], [entry], finish_reason="error", error="why"))
    assert first == RequestOutput(
        "a", [1, 2], [entry] * 2, [entry] * 2, "error", cached_tokens=4, error="why", queued_s=2.0
    )


def test_closing_the_iterator_aborts_and_later_outputs_are_ignored(tmp_path: Path):
    async def scene(client: ZmqEngineClient, engine: Played) -> None:
        outputs = client.generate(submit())
        first = asyncio.ensure_future(anext(outputs))
        await engine.hear(Submit)
        engine.tell(Outputs([RequestOutput("a", [0])]))
        await first
        await outputs.aclose()
        assert (await engine.hear(Abort)).request_ids == ["a"]
        engine.tell(Outputs([RequestOutput("a", [1])]))
        engine.tell(Outputs([RequestOutput("a", finish_reason="abort")]))
        engine.tell(Stats(steps=1))
        while client.stats.steps != 1:
            await asyncio.sleep(0.002)
        assert client.unfinished == 0 and client.state != "failed"

    play(tmp_path, scene)


def test_cancelling_the_reader_aborts(tmp_path: Path):
    async def scene(client: ZmqEngineClient, engine: Played) -> None:
        async def read() -> None:
            async for _ in client.generate(submit()):
                pass

        task = asyncio.create_task(read())
        await engine.hear(Submit)
        assert client.unfinished == 1
        task.cancel()
        assert (await engine.hear(Abort)).request_ids == ["a"]
        assert client.unfinished == 0

    play(tmp_path, scene)


def test_a_finished_request_is_not_aborted(tmp_path: Path):
    async def scene(client: ZmqEngineClient, engine: Played) -> None:
        outputs = client.generate(submit())
        first = asyncio.ensure_future(anext(outputs))
        await engine.hear(Submit)
        engine.tell(Outputs([RequestOutput("a", [0], finish_reason="length")]))
        await first
        await outputs.aclose()
        call = asyncio.create_task(client.call("x"))
        await engine.hear(Call)
        assert not any(isinstance(message, Abort) for message in engine.heard)
        call.cancel()

    play(tmp_path, scene)


def test_request_id_in_use_is_refused(tmp_path: Path):
    async def scene(client: ZmqEngineClient, engine: Played) -> None:
        first = asyncio.ensure_future(anext(client.generate(submit())))
        await engine.hear(Submit)
        with pytest.raises(ValueError, match="in use"):
            await anext(client.generate(submit()))
        first.cancel()

    play(tmp_path, scene)


def test_state_is_told_to_who_comes_late(tmp_path: Path):
    async def run() -> None:
        server = EngineServer(f"ipc://{tmp_path}/e")
        server.announce(EngineProgress("load", 1, 2))
        server.announce(READY)
        client = ZmqEngineClient(f"ipc://{tmp_path}/e")
        await client.start()
        await Played(server).hear(Call)
        assert await asyncio.wait_for(client.wait_ready(), 5) == READY
        assert client.state == "ready"
        await client.close()
        server.close()

    asyncio.run(run())


def test_engine_failed_reaches_readers_calls_and_waiters(tmp_path: Path):
    async def scene(client: ZmqEngineClient, engine: Played) -> None:
        reader = asyncio.ensure_future(anext(client.generate(submit())))
        call = asyncio.ensure_future(client.call("memory"))
        waiter = asyncio.ensure_future(client.wait_ready())
        await engine.hear(Submit)
        engine.tell(EngineFailed("out of luck"))
        ends = await asyncio.gather(reader, call, waiter, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineDead] * 3
        assert {str(end) for end in ends} == {"out of luck"}
        assert client.state == "failed" and client.unfinished == 0

    play(tmp_path, scene)


def test_tokens_that_came_before_the_failure_are_still_read(tmp_path: Path):
    async def scene(client: ZmqEngineClient, engine: Played) -> None:
        outputs = client.generate(submit())
        first = asyncio.ensure_future(anext(outputs))
        await engine.hear(Submit)
        engine.tell(Outputs([RequestOutput("a", [1])]))
        await first
        engine.tell(Outputs([RequestOutput("a", [2])]))
        engine.tell(EngineFailed("gone"))
        while client.state != "failed":
            await asyncio.sleep(0.002)
        assert (await anext(outputs)).token_ids == [2]
        with pytest.raises(EngineDead, match="gone"):
            await anext(outputs)

    play(tmp_path, scene)


def test_calls_are_answered_by_number(tmp_path: Path):
    async def scene(client: ZmqEngineClient, engine: Played) -> None:
        await engine.hear(Call)  # the one that says hello
        first = asyncio.ensure_future(client.call("one", a=1))
        second = asyncio.ensure_future(client.call("two"))
        one, two = await engine.hear(Call), await engine.hear(Call)
        assert (one.method, one.args, two.method) == ("one", {"a": 1}, "two")
        engine.tell(CallReply(two.call_id, error="no"))
        engine.tell(CallReply(one.call_id, result=[1]))
        assert await first == [1]
        with pytest.raises(RuntimeError, match="no"):
            await second

    play(tmp_path, scene)


class EndedProcess:
    """A handle of a process that ends when `end` is called."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def end(self, code: int) -> None:
        self.exit_code = code
        os.write(self._write, b"x")


@pytest.mark.parametrize(("code", "text"), [(-9, "signal 9"), (3, "exit code 3")])
def test_end_of_the_process_is_the_end_of_everything(tmp_path: Path, code: int, text: str):
    process = EndedProcess()

    async def scene(client: ZmqEngineClient, engine: Played) -> None:
        reader = asyncio.ensure_future(anext(client.generate(submit())))
        await engine.hear(Submit)
        process.end(code)
        with pytest.raises(EngineDead, match=text):
            await reader

    play(tmp_path, scene, process)


def test_last_words_win_over_the_exit_code(tmp_path: Path):
    process = EndedProcess()

    async def scene(client: ZmqEngineClient, engine: Played) -> None:
        await engine.hear(Call)
        process.end(1)
        engine.tell(EngineFailed("the reason"))
        with pytest.raises(EngineDead, match="the reason"):
            await client.wait_ready()

    play(tmp_path, scene, process)


def test_close_stops_the_engine_only_if_it_is_ours(tmp_path: Path):
    async def run(process) -> list:
        address = f"ipc://{tmp_path}/{'own' if process else 'other'}"
        server = EngineServer(address)
        client = ZmqEngineClient(address, process)
        await client.start()
        engine = Played(server)
        await engine.hear(Call)
        reader = asyncio.ensure_future(anext(client.generate(submit())))
        await engine.hear(Submit)
        await client.close()
        with pytest.raises(EngineDead, match="shutting down"):
            await reader
        with pytest.raises(EngineDead):
            await anext(client.generate(submit("b")))
        if process:
            await engine.hear(Shutdown)
        await asyncio.sleep(0.05)
        found = [message for _, message in server.receive()]
        server.close()
        return found

    asyncio.run(run(EndedProcess()))
    assert not any(isinstance(m, Shutdown) for m in asyncio.run(run(None)))


def test_server_skips_what_is_no_message(tmp_path: Path, caplog):
    async def scene(client: ZmqEngineClient, engine: Played) -> None:
        await engine.hear(Call)
        stranger = zmq.Context.instance().socket(zmq.DEALER)
        stranger.connect(f"ipc://{tmp_path}/e")
        stranger.send(b"\x00 not msgpack of ours")
        stranger.send_multipart([b"two", b"parts"])
        deadline = time.monotonic() + 5
        while len(caplog.records) < 2 and time.monotonic() < deadline:
            engine.heard += [message for _, message in engine.server.receive()]
            await asyncio.sleep(0.002)
        stranger.close(0)
        assert len(caplog.records) == 2
        task = asyncio.ensure_future(anext(client.generate(submit())))
        await engine.hear(Submit)
        task.cancel()

    play(tmp_path, scene)


def test_audience_splits_by_client_and_forgets_who_is_done():
    audience = Audience()
    for name, client in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        audience.add(name, client)
    outputs = [RequestOutput("a", [1]), RequestOutput("b", [2]), RequestOutput("c", [3])]
    outputs[2].finish_reason = "stop"
    shares = audience.split(outputs)
    assert {c: [o.request_id for o in share] for c, share in shares.items()} == {
        b"1": ["a", "c"],
        b"2": ["b"],
    }
    assert "c" not in audience and "a" in audience
