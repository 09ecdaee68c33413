"""The engine loop and its start-up in this process: a thread runs it, the scripted executor answers."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import zmq

from headrace.engine.config.flag import Given
from headrace.engine.config.names import all_spellings
from headrace.engine.config.resolve import merge_defaults, resolve
from headrace.engine.config.settings import CacheSettings, EngineConfig, SchedulerSettings
from headrace.engine.core import startup
from headrace.engine.core.boot import Boot
from headrace.engine.core.engine import Engine
from headrace.engine.core.executor import WorkerFailed, WorkerInfo
from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.stop import StopSignal
from headrace.engine.ipc.messages import (
    Call,
    EngineProgress,
    Outputs,
    RequestOutput,
    Shutdown,
    Stats,
    Submit,
    encoder,
    from_engine_decoder,
)
from headrace.engine.ipc.server import EngineServer
from headrace.engine.kv_cache.plan import KVPlanError
from headrace.platforms.platform import Default
from tests.engine.engine_process import DEVICE, FILES, scripted_config, scripted_spec
from tests.engine.scripted_executor import Script, ScriptedExecutor, expected_tokens


class Live:
    """An engine in a thread, and a bare socket to it."""

    def __init__(self, tmp_path: Path, script: Script) -> None:
        config = scripted_config(script)
        address = f"ipc://{tmp_path}/e"
        boot = Boot(address, config, FILES, DEVICE)
        self.executor = ScriptedExecutor(script, config.scheduler.max_num_seqs)
        self.parts = startup.start(
            boot, self.executor, scripted_spec(script), startup.PhaseClock(lambda _: None)
        )
        self.server = EngineServer(address)
        self.stop = StopSignal()
        self.engine = Engine(
            self.parts.scheduler, self.executor, self.server, self.stop, script.graphs
        )
        self.error: Exception | None = None
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.connect(address)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.engine.run()
        except Exception as error:
            self.error = error

    def tell(self, *messages) -> None:
        for message in messages:
            self.socket.send(encoder.encode(message))

    def hear(self, kind: type):
        while self.socket.poll(5000):
            message = from_engine_decoder.decode(self.socket.recv())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} came")

    def answers(self, count: int) -> dict[str, tuple[list[int], RequestOutput]]:
        """Tokens and last outputs until `count` requests have ended."""
        tokens: dict[str, list[int]] = {}
        ended: dict[str, RequestOutput] = {}
        while len(ended) < count:
            for output in self.hear(Outputs).outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason:
                    ended[output.request_id] = output
        return {name: (tokens[name], output) for name, output in ended.items()}

    def close(self) -> None:
        self.stop.set("the test is over")
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.executor.close()
        self.socket.close(0)
        self.server.close()


@pytest.fixture
def start(tmp_path: Path):
    engines: list[Live] = []

    def make(script: Script | None = None) -> Live:
        engines.append(Live(tmp_path, script or Script()))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def submit(name: str, prompt: list[int], **sampling) -> Submit:
    return Submit(name, np.array(prompt, np.int32).tobytes(), SamplingParams(**sampling))


def test_requests_are_answered_and_idle_begins_with_stats(start):
    live = start()
    live.tell(submit("a", [1, 2], max_tokens=5), submit("b", [3], max_tokens=2))
    answers = live.answers(2)
    assert answers["a"][0] == expected_tokens([1, 2], 5, Script())
    assert answers["b"][0] == expected_tokens([3], 2, Script())
    while (stats := live.hear(Stats)).running:
        pass
    assert stats.generated_tokens == 7 and stats.kv_used_blocks == 0


def test_second_request_of_an_unfinished_id_is_dropped_not_answered(start, caplog):
    live = start(Script(step_seconds=0.01))
    live.tell(submit("a", [1], max_tokens=20), submit("a", [2], max_tokens=1))
    tokens, last = live.answers(1)["a"]
    assert tokens == expected_tokens([1], 20, Script()) and last.finish_reason == "length"
    assert "second request" in caplog.text


def test_shutdown_answers_who_waits_and_ends_the_loop(start):
    live = start(Script(step_seconds=0.02))
    live.tell(submit("a", [1], max_tokens=400))
    live.hear(Outputs)
    live.tell(Shutdown())
    assert live.answers(1)["a"][1].finish_reason == "abort"
    live.thread.join(5)
    assert not live.thread.is_alive() and live.error is None


def test_worker_that_dies_while_idle_ends_the_loop(start):
    live = start()
    live.tell(submit("a", [1], max_tokens=2))
    live.answers(1)
    live.executor.lose_worker("it fell over")
    live.thread.join(5)
    assert isinstance(live.error, WorkerFailed) and "it fell over" in str(live.error)


def test_leaks_are_logged_when_idle_begins(start, caplog):
    live = start()
    live.parts.scheduler.kv.pools[0].take()
    with caplog.at_level(logging.ERROR):
        live.tell(submit("a", [1], max_tokens=2))
        live.answers(1)
        live.tell(Call(1, "memory"))
        while live.hear(Stats).running:
            pass
        deadline = time.monotonic() + 5
        while "lost track" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "1 references, 0 are held" in caplog.text


def test_a_request_nobody_can_place_fails_instead_of_hanging(start, caplog):
    live = start()
    pool = live.parts.scheduler.kv.pools[0]
    while pool.available:
        pool.take()
    live.tell(submit("a", [1], max_tokens=2))
    _, last = live.answers(1)["a"]
    assert last.finish_reason == "error" and "room" in last.error
    assert "no step could be made" in caplog.text


# ---- start-up


def info(free: int, weights: int, activation: int) -> WorkerInfo:
    return WorkerInfo("d", "float32", weights, [], [], free, activation, 10, [])


def test_budget_is_a_share_of_what_was_free_at_the_start():
    def budget(**cache) -> int:
        config = EngineConfig(cache=CacheSettings(**cache))
        return startup.kv_budget(config, info(600, 300, 100))[0]

    assert budget(memory_utilization=0.9) == 500
    assert budget(memory_utilization=0.3) < 0
    assert budget(kv_cache_memory=77) == 77


def test_a_platforms_budget_is_cut_to_what_is_free():
    def budget(size: int) -> tuple[int, str]:
        proposal = {"cache.kv_cache_memory": Default(size, "a quarter")}
        config = merge_defaults(EngineConfig(), proposal, "platform test")
        return startup.kv_budget(config, info(600 << 20, 300 << 20, 100 << 20))

    assert budget(500 << 20) == (500 << 20, "")
    size, note = budget(501 << 20)
    assert size == 500 << 20 and "501 MiB" in note and "600 MiB are free" in note


def test_graphs_are_captured_while_nothing_runs_and_the_count_is_told(start):
    live = start(Script(graphs=3, step_seconds=0.01))
    live.tell(submit("a", [1, 2], max_tokens=5))
    assert live.answers(1)["a"][0] == expected_tokens([1, 2], 5, Script())
    while (stats := live.hear(Stats)).graphs < 3:
        pass
    assert stats.graphs_planned == 3
    assert live.executor.calls == [("capture_graph", ())] * 3
    live.tell(submit("b", [3], max_tokens=2))
    assert live.answers(1)["b"][0] == expected_tokens([3], 2, Script())


def test_a_capture_that_fails_ends_captures_only(start, monkeypatch, caplog):
    def refuse(*_):
        raise ValueError("no room")

    monkeypatch.setattr(ScriptedExecutor, "call", refuse)
    live = start(Script(graphs=3))
    live.tell(submit("a", [1, 2], max_tokens=5))
    assert live.answers(1)["a"][0] == expected_tokens([1, 2], 5, Script())
    assert caplog.text.count("captured only when they are needed: no room") <= 1
    assert live.error is None


def test_a_budget_that_a_user_chose_is_met_or_refused():
    row = all_spellings()["--kv-cache-memory-bytes"].flag
    config = resolve([Given(row, "590MiB", f"flag {row.name}")])
    config = merge_defaults(
        config, {"cache.kv_cache_memory": Default(1, "never taken")}, "platform test"
    )
    assert startup.kv_budget(config, info(590 << 20, 300 << 20, 0)) == (590 << 20, "")
    refused = "590 MiB does not fit the 589 MiB.* weights .300 MiB.* lower it to 500 MiB"
    with pytest.raises(KVPlanError, match=refused):
        startup.kv_budget(config, info(589 << 20, 300 << 20, 0))


@pytest.mark.parametrize(
    ("given", "rows", "tokens"), [(0, 256, 2048), (0, 4000, 4000), (99, 8, 99)]
)
def test_step_tokens_are_settled_for_scheduler_and_workers(given: int, rows: int, tokens: int):
    settings = SchedulerSettings(max_num_seqs=rows, max_num_batched_tokens=given)
    config = startup.with_step_tokens(EngineConfig(scheduler=settings))
    assert config.scheduler.max_num_batched_tokens == tokens


def test_progress_is_thinned_out_but_beginnings_and_ends_are_kept():
    published: list[EngineProgress] = []
    clock = startup.PhaseClock(published.append)
    for done in range(1, 1001):
        clock("load", done, 1000, "")
    clock("kv", 0, 0, "")
    assert len(published) < 100
    shown = [(progress.phase, progress.done) for progress in published]
    assert shown[0] == ("load", 1) and ("load", 1000) in shown and shown[-1] == ("kv", 0)
    assert set(clock.stop()) == {"import", "load", "kv"}
