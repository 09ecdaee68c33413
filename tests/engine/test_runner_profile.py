"""A step's profile: what each op has to do, which ops a step has, that nothing of it stays, and when it is refused."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity

from headrace.cli.bench import trace
from headrace.engine.runner import profile, watch
from headrace.engine.runner.watch import stored
from headrace.engine.workers.executor import CallFailed
from headrace.platforms.attention import PagedAttention
from headrace.platforms.cpu.runtime import CpuRuntime
from headrace.platforms.linear import EmbeddingImpl, ExpertsImpl, LinearImpl
from headrace.platforms.profiling import costs
from headrace.platforms.profiling.costs import Cost
from headrace.platforms.queries import (
    ActivationQuery,
    AttentionQuery,
    EmbeddingQuery,
    ExpertsQuery,
    LinearQuery,
)
from tests.engine.driver import LocalEngine, greedy
from tests.engine.tiny_models import make_tiny

PROMPT = [7, 3, 5, 8, 2, 9, 4] * 5


def view(*lengths: tuple[int, int]) -> SimpleNamespace:
    """Of requests with (length, new tokens)."""
    starts = np.cumsum([0, *(new for _, new in lengths)]).astype(np.int32)
    return SimpleNamespace(
        num_reqs=len(lengths),
        seq_lens_host=np.array([length for length, _ in lengths], np.int32),
        query_start_loc_host=starts,
    )


def cost(query, method, args, step):
    return costs.cost(query, method, args, step, stored)


def test_costs():
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    linear = LinearQuery(64, 96, "bfloat16")
    assert cost(linear, "", (x,), view()) == Cost(
        "64x96 bfloat16", 2 * (64 * 96 + 3 * (64 + 96)), 2 * 3 * 64 * 96
    )
    assert cost(linear, "gated", (x,), view()).nbytes == 2 * (64 * 96 + 3 * (64 + 48))
    assert stored(64, "Q4_0") == 36 and stored(64, "fp8_e4m3") == 64
    ids = torch.tensor([[0, 1], [1, 2], [1, 0]])
    experts = ExpertsQuery(8, 2, 64, 32, "bfloat16")
    found = cost(experts, "", (x, torch.ones(3, 2), ids), view())
    assert found.nbytes == 2 * (3 * 3 * 64 * 32 + 2 * 3 * 64)  # three experts are needed
    assert found.operations == 6 * 3 * 2 * 64 * 32
    table = torch.zeros(1000, 64)
    embedding = EmbeddingQuery(1000, 64, "bfloat16")
    assert cost(embedding, "", (torch.zeros(3), table), view()).nbytes == 2 * 2 * 3 * 64
    assert cost(ActivationQuery(64, "bfloat16"), "", (x,), view()).nbytes == 2 * x.nbytes


def test_costs_of_attention():
    query = AttentionQuery(4, 2, 16, 16, "bfloat16", "int8", 0.25)
    q = torch.zeros(5, 4, 16)
    found = cost(query, "attend", (q,), view((10, 1), (8, 4)))
    # every key and value once; queries and results
    assert found.nbytes == (10 + 8) * 2 * 32 + 2 * 5 * 4 * 32
    assert found.operations == 2 * (10 + 5 + 6 + 7 + 8) * 4 * 32
    window = AttentionQuery(4, 2, 16, 16, "bfloat16", "int8", 0.25, window=3)
    found = cost(window, "attend", (q,), view((10, 1), (8, 4)))
    assert found.nbytes == (3 + 6) * 2 * 32 + 2 * 5 * 4 * 32
    assert found.operations == 2 * (5 * 3) * 4 * 32
    k = torch.zeros(5, 2, 16)
    assert cost(query, "write", (k, k, None, None), view()).nbytes == 4 * k.nbytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_tiny("llama", path)
    return path


@pytest.mark.parametrize(
    ("disable", "sizes"),
    [
        ((), (1, 20)),
        ((), (16, 250)),
        ((), (2, 0, 100)),
        (("native",), (3, 200)),
        (("native",), (3, 30, 1)),
        ((), (2, 30, 40, 3)),
    ],
)
def test_every_op_of_a_step_is_there_and_nothing_stays(folder, disable, sizes):
    with LocalEngine(folder, disable=disable) as engine:
        (before,) = engine.run([PROMPT], greedy(12))
        step = engine.executor.call("profile_step", *sizes)
        engine.scheduler.kv.forget_all()  # as the engine does
        (after,) = engine.run([PROMPT], greedy(12))
    assert after.tokens == before.tokens and not after.cached
    ops = [op for op, *_ in step["ops"]]
    assert ops.count("linear") == 3 * 4 + 1 and ops[0] == "embedding"
    assert sum("attention" in op for op in ops) >= 3
    assert all(seconds > 0 for *_, seconds in step["ops"]) and not step["trace"]
    assert step["filled"] == sizes[0] + sum(sizes[3:]) and step["steps"] >= 3 and step["on_host"]
    assert 0 < step["host"]["launch"] < step["step_s"] * 2
    assert step["bandwidth"] > 1e8 and step["multiply"] > 1e8


def test_a_cache_that_is_too_small_for_all_contexts(folder):
    with LocalEngine(folder, num_blocks=18) as engine:
        step = engine.executor.call("profile_step", 4, 200)  # 13 blocks each
        assert step["steps"] >= 3
        (answer,) = engine.run([PROMPT], greedy(3))
    assert len(answer.tokens) == 3


def test_what_a_profiler_that_sees_no_kernels_leaves(folder, monkeypatch):
    """As where its library is missing: the ops are timed by the clock."""
    monkeypatch.setattr(CpuRuntime, "profiler_activity", lambda self: ProfilerActivity.CPU)
    with LocalEngine(folder) as engine:
        step = engine.executor.call("profile_step", 3, 50)
    assert not step["trace"] and all(seconds > 0 for *_, seconds in step["ops"])


def test_marks_of_the_profiler_are_read_as_they_are_written(folder, monkeypatch):
    """Every op and step has its mark in the trace, and what is launched within is found by it."""
    events: list = []

    def keep(event):
        if profile._KINDS[-1] == event.get("cat") and event["name"].startswith("headrace"):
            events.append(profile._short(event))
        return False

    monkeypatch.setattr(CpuRuntime, "profiler_activity", lambda self: ProfilerActivity.CPU)
    monkeypatch.setattr(profile, "_matters", keep)
    with LocalEngine(folder) as engine:
        step = engine.executor.call("profile_step", 3, 50)
    for number, mark in enumerate(
        list(events)
    ):  # a kernel for every mark, as a device would have them
        common = {
            "ts": mark["ts"] + 0.5 * mark["dur"],
            "pid": 1,
            "args": {"correlation": number + 1},
        }
        events.append({**common, "cat": "x_runtime", "name": "l", "dur": 0.0, "tid": mark["tid"]})
        events.append({**common, "cat": "kernel", "name": "k", "dur": 1.0, "tid": 7})
    found = list(trace._launched(events))
    assert {one.op for one in found} == {-1, *range(len(step["ops"]))}
    assert len({one.step for one in found}) == 1 + step["steps"]
    assert {one.part for one in found} == {"", "inputs", "launch", "sampling"}


def test_what_cannot_be_had_is_said(folder):
    with LocalEngine(folder) as engine:
        for sizes in ((0, 50), (17, 50), (1, 0), (1, 256), (1, 200, 56)):
            with pytest.raises(CallFailed, match="must be from 1"):
                engine.executor.call("profile_step", *sizes)
        with pytest.raises(CallFailed, match="--max-num-batched-tokens"):
            engine.executor.call("profile_step", 16, 10, 33)
        with pytest.raises(CallFailed, match="say prompt"):
            engine.executor.call("profile_step", 2, 10, 0, 3)


def test_attention_that_turns_reads_what_attention_reads():
    """And new keys and values, which it writes as well."""
    query = AttentionQuery(4, 2, 8, 8, "float32", "float32", 0.1)
    view = SimpleNamespace(
        num_reqs=2,
        seq_lens_host=np.array([5, 3], np.int32),
        query_start_loc_host=np.array([0, 1, 2], np.int32),
    )
    q, k = torch.zeros(2, 4, 8), torch.zeros(2, 2, 8)
    plain = costs.cost(query, "attend", (q,), view, stored)
    turned = costs.cost(query, "turn_and_attend", (q, k, k), view, stored)
    assert turned == Cost(plain.detail, plain.nbytes + 2 * 2 * k.nbytes, plain.operations)


def test_every_way_to_call_an_op_is_watched():
    """A method that layers call and the profile does not know would be missing from its tables."""
    contracts = (PagedAttention, LinearImpl, EmbeddingImpl, ExpertsImpl)
    computing = {
        name
        for contract in contracts
        for name, method in vars(contract).items()
        if inspect.isfunction(method)
        and [p.annotation for p in inspect.signature(method).parameters.values()][1:2]
        == ["torch.Tensor"]
    }
    assert {"attend", "normed"} < computing
    assert computing - {"__call__", "pack", "canonical"} == set(watch._METHODS)
