"""Sleep: what the engine loop allows, and that a model answers the same after it has slept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.core.executor import WorkerFailed
from headrace.engine.core.sleep import ASLEEP, ENDED
from headrace.engine.ipc.messages import Call, CallReply, Outputs, Stats
from headrace.engine.workers.executor import CallFailed
from headrace.platforms.cpu.runtime import CpuAllocator, CpuRuntime
from headrace.platforms.torch_device.allocator import TorchAllocator
from headrace.platforms.torch_device.vmm import CUDA
from tests.engine.driver import LocalEngine, greedy
from tests.engine.scripted_executor import Script, expected_tokens
from tests.engine.test_engine_loop import Live, start, submit  # noqa: F401 - start is a fixture
from tests.engine.tiny_models import make_tiny, prompt
from tests.platforms.torch_device.stand_in import Module, StandIn, build

# ---- the loop


class Workers:
    """In place of the executor's `call`: remembers what sleeps, fails when told to."""

    def __init__(self, live: Live) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing: dict[str, Exception] = {}
        self._live = live
        live.executor.call = self.call  # type: ignore[method-assign]

    def call(self, method: str, *args: Any) -> Any:
        assert not self._live.parts.scheduler.steps_in_flight
        self.calls.append((method, *args))
        if method in self.failing:
            raise self.failing.pop(method)
        return (
            {"freed_bytes": {"weights": 2, "kv_cache": 3}, "notes": []}
            if method == "sleep"
            else None
        )


@pytest.fixture
def live(start):  # noqa: F811
    return start(Script(step_seconds=0.005))


@pytest.fixture
def workers(live):
    return Workers(live)


def ask(live: Live, method: str, **args: Any) -> CallReply:
    live.tell(Call(7, method, args))
    return live.hear(CallReply)


def complete(live: Live, name: str) -> list[int]:
    live.tell(submit(name, [1, 2], max_tokens=3))
    tokens, last = live.answers(1)[name]
    assert last.finish_reason == "length"
    assert tokens == expected_tokens([1, 2], 3, Script())
    return tokens


def sleeping(live: Live) -> bool:
    return ask(live, "stats").result["sleeping"]


def test_requests_end_and_none_is_taken_until_all_is_awake(live, workers):
    live.tell(submit("a", [1], max_tokens=5000))
    live.hear(Outputs)
    live.tell(Call(7, "sleep", {"level": 1, "mode": "abort"}))
    _, last = live.answers(1)["a"]
    assert (last.finish_reason, last.error) == ("abort", ENDED)
    reply = live.hear(CallReply)
    assert reply.result == {"level": 1, "freed_bytes": {"weights": 2, "kv_cache": 3}, "notes": []}
    live.tell(submit("b", [1], max_tokens=5))
    _, last = live.answers(1)["b"]
    assert (last.finish_reason, last.error) == ("abort", ASLEEP)
    assert sleeping(live) and ask(live, "profile_step").error == ASLEEP
    assert ask(live, "selection").error == ""
    assert ask(live, "wake", tags=["weights"]).result["asleep"] == ["kv_cache"]
    assert sleeping(live) and ask(live, "profile_step").error == ASLEEP
    assert ask(live, "wake", tags=["kv_cache"]).result["asleep"] == []
    assert not sleeping(live)
    complete(live, "c")
    assert workers.calls == [
        ("sleep", 1), ("selection",), ("wake", ["weights"]), ("wake", ["kv_cache"])
    ]  # fmt: skip


def test_wait_lets_requests_finish_but_takes_no_more(live, workers):
    live.tell(submit("a", [1], max_tokens=60))
    live.hear(Outputs)
    live.tell(Call(7, "sleep", {"level": 2, "mode": "wait"}), submit("b", [1], max_tokens=5))
    answers = live.answers(2)
    assert answers["a"][1].finish_reason == "length" and answers["b"][1].error == ASLEEP
    assert live.hear(CallReply).result["level"] == 2 and workers.calls == [("sleep", 2)]
    assert ask(live, "wake").result == {"asleep": [], "notes": []}
    complete(live, "c")


def test_who_wakes_it_before_it_sleeps_calls_sleep_off(live, workers):
    live.tell(submit("a", [1], max_tokens=200))
    live.hear(Outputs)
    live.tell(Call(1, "sleep", {"level": 1, "mode": "wait"}), Call(2, "wake", {}))
    answers = [live.hear(CallReply) for _ in range(2)]
    assert [answer.call_id for answer in answers] == [1, 2]
    assert "before the running requests had finished" in answers[0].error
    complete(live, "b")
    assert live.answers(1)["a"][1].finish_reason == "length"
    assert workers.calls == [] and not sleeping(live)


def test_the_state_is_told_before_the_answer(live, workers):
    live.tell(Call(7, "sleep", {"level": 1}))
    assert live.hear(Stats).sleeping
    live.hear(CallReply)
    live.tell(Call(8, "wake", {}))
    assert not live.hear(Stats).sleeping


def test_asking_twice_changes_nothing(live, workers):
    assert ask(live, "wake").result == {"asleep": [], "notes": ["it was awake"]}
    ask(live, "sleep", level=2)
    again = ask(live, "sleep", level=1).result
    assert again["level"] == 2 and again["freed_bytes"] == {"weights": 0, "kv_cache": 0}
    assert "already" in again["notes"][0]
    ask(live, "wake")
    assert workers.calls == [("sleep", 2), ("wake", ["weights", "kv_cache"])]
    complete(live, "a")


def test_the_prefix_cache_is_forgotten(live, workers):
    long = list(range(100))
    for name in ("a", "b"):
        live.tell(submit(name, long, max_tokens=1))
        live.answers(1)
    hits = ask(live, "stats").result["prefix_hits"]
    assert hits > 0
    ask(live, "sleep", level=1), ask(live, "wake")
    live.tell(submit("c", long, max_tokens=1))
    live.answers(1)
    assert ask(live, "stats").result["prefix_hits"] == hits


def test_what_cannot_sleep_is_woken_whole(live, workers):
    workers.failing["sleep"] = CallFailed("worker 1: no room")
    assert ask(live, "sleep", level=1).error == "worker 1: no room"
    assert workers.calls == [("sleep", 1), ("wake", ["weights", "kv_cache"])]
    assert not sleeping(live)
    complete(live, "a")


def test_what_cannot_wake_sleeps_on_and_is_asked_again(live, workers):
    ask(live, "sleep", level=1)
    workers.failing["wake"] = CallFailed("out of memory")
    assert ask(live, "wake").error == "out of memory"
    assert sleeping(live)
    assert ask(live, "wake").error == "" and not sleeping(live)
    complete(live, "a")


def test_a_worker_that_dies_in_its_sleep_ends_the_engine(live, workers):
    ask(live, "sleep", level=1)
    workers.failing["wake"] = WorkerFailed("it is gone")
    live.tell(Call(7, "wake", {}))
    live.thread.join(5)
    assert not live.thread.is_alive() and "it is gone" in str(live.error)


# ---- models

PROMPTS = [prompt(length) for length in (1, 17, 40)]
SETTINGS: dict[str, Any] = {"sleep_mode": True, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    make_tiny("qwen3", made)
    return made


def answers(engine: LocalEngine) -> list[list[int]]:
    found = [answer.tokens for answer in engine.run(PROMPTS, greedy(12))]
    engine.scheduler.kv.forget_all()
    return found


def awake(engine: LocalEngine) -> None:
    engine.executor.call("wake", ["weights", "kv_cache"])


def runtime_of(engine: LocalEngine) -> Any:
    """Of the worker that lives in a thread here."""
    import gc

    (found,) = [
        one for one in gc.get_objects() if isinstance(one, CpuRuntime) and one._allocator.stats()
    ]
    return found


def test_a_cpu_gives_its_cache_back_and_keeps_its_graphs(folder):
    with LocalEngine(folder, **SETTINGS) as engine:
        (note,) = engine.info.notes
        assert note.startswith("sleep does not free the weights, because they are in the host")
        before = answers(engine)
        for level in (1, 2):
            answer = engine.executor.call("sleep", level)
            assert answer["freed_bytes"]["kv_cache"] > engine.plan.total_bytes * 0.9
            assert answer["freed_bytes"]["weights"] == 0
            (note,) = answer["notes"]
            assert note.startswith("the weights stay where they are, because they are in the host")
            awake(engine)
            assert answers(engine) == before


@pytest.mark.parametrize("world", [1, 2])
def test_a_device_that_keeps_no_addresses_makes_its_cache_anew(folder, monkeypatch, world):
    if world == 1:
        monkeypatch.setattr(CpuAllocator, "stays_awake", lambda *_: "of the test")
    with LocalEngine(folder, tensor_parallel_size=world, **SETTINGS) as engine:
        before = answers(engine)
        answer = engine.executor.call("sleep", 1)
        if world == 1:
            assert answer["freed_bytes"]["kv_cache"] == engine.plan.total_bytes
            assert "captures graphs again, because of the test" in answer["notes"][1]
        awake(engine)
        assert answers(engine) == before


@pytest.fixture
def virtual(tmp_path, monkeypatch) -> StandIn:
    """Weights and cache of the CPU in the memory of a stand-in for a driver: where it sleeps, a touch would crash."""
    stand_in = StandIn(build(CUDA, tmp_path), CUDA)
    stand_in.limit(1 << 30)
    monkeypatch.setattr(torch, "get_device_module", lambda _: Module())
    opened: dict[int, TorchAllocator] = {}

    def allocator(runtime: CpuRuntime) -> TorchAllocator:
        make = TorchAllocator(runtime.device, stand_in.driver)
        return opened.setdefault(id(runtime), make)

    monkeypatch.setattr(CpuRuntime, "allocator", allocator)
    return stand_in


@pytest.mark.parametrize("level", [1, 2])
def test_weights_and_cache_sleep_and_answers_stay(folder, virtual, level):
    with LocalEngine(folder, **SETTINGS) as engine:
        before = answers(engine)
        held = virtual.used
        assert held > engine.plan.total_bytes
        answer = engine.executor.call("sleep", level)
        assert (
            virtual.used == 0
            and sum(answer["freed_bytes"].values()) == held
            and not answer["notes"]
        )
        engine.executor.call("wake", ["weights"])
        assert 0 < virtual.used < held
        engine.executor.call("wake", ["kv_cache"])
        assert virtual.used == held and answers(engine) == before
        # again, with too little memory at first
        engine.executor.call("sleep", level)
        virtual.limit(held // 2)
        with pytest.raises(CallFailed, match="out of memory"):
            awake(engine)
        virtual.limit(1 << 30)
        awake(engine)
        assert virtual.used == held and answers(engine) == before
