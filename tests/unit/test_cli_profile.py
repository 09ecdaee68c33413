"""bench profile: what /debug/step answers, as tables and traces; what the processes do, from their processor times."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from headrace.cli.bench import hosts, run, trace
from headrace.cli.bench.client import Sample
from headrace.cli.bench.profile import grouped, host_line, summary, table

HOST = {"inputs": 1e-4, "launch": 2e-4, "sampling": 1e-4, "results": 5e-5, "other": 0.0}
STEP: dict[str, Any] = {
    "requests": 4,
    "context": 256,
    "prompt": 0,
    "decodes": 0,
    "filled": 4,
    "steps": 3,
    "max_model_len": 512,
    "step_s": 0.010,
    "host": {**HOST, "wait": 0.0},
    "on_host": True,
    "spans": [("inputs", 5.0, 5.1, 0.1), ("launch", 5.1, 5.3, 0.2)],
    "bandwidth": 10e9,
    "multiply": 1e12,
    "ops": [
        ["linear", "64x64 Q4_0", 10_000_000, 0, 0.002],
        ["rms_norm", "", 0, 0, 0.001],
        ["linear", "64x64 Q4_0", 10_000_000, 0, 0.002],
        ["linear", "64x99 Q8_0", 30_000_000, 5_000_000_000, 0.010 / 3],
    ],
    "trace": [],
}


def test_equal_ops_are_one_row_and_the_rest_is_named():
    rows = grouped(STEP)
    assert [(row["op"], row["count"]) for row in rows] == [
        ("linear", 2),
        ("linear", 1),
        ("rms_norm", 1),
        ("the rest", 1),
    ]
    first, second, norm, rest = rows
    assert (first["seconds"], first["bytes"], first["share"]) == (0.004, 20_000_000, 0.4)
    assert first["limit_s"] == pytest.approx(0.002) and first["of_limit"] == pytest.approx(0.5)
    # 3 ms to read and 5 ms to compute: the larger is the limit
    assert second["limit_s"] == pytest.approx(0.005) and second["of_limit"] == pytest.approx(1.5)
    assert norm["of_limit"] is None and rest["seconds"] == pytest.approx(0.005 - 0.010 / 3)


def test_a_step_against_the_limit():
    whole = summary(STEP, grouped(STEP))
    assert whole["bytes"] == 50_000_000 and whole["limit_s"] == pytest.approx(0.007)
    assert whole["of_limit"] == pytest.approx(0.7) and whole["tokens_per_s"] == pytest.approx(400)
    assert whole["host_s"] == pytest.approx(4.5e-4) and whole["hidden"] is None
    blind = {**STEP, "bandwidth": 0.0, "multiply": 0.0}
    whole = summary(blind, grouped(blind))
    assert whole["limit_s"] is None and whole["of_limit"] is None


def test_ops_slower_alone_than_in_the_step_leave_no_negative_rest():
    assert grouped({**STEP, "step_s": 0.001})[-1]["seconds"] == 0.0


@pytest.mark.parametrize("bandwidth", [0.0, 10e9])
@pytest.mark.parametrize("prompt", [0, 32])
def test_the_table_can_be_drawn(bandwidth, prompt):
    step = {**STEP, "bandwidth": bandwidth, "prompt": prompt, "multiply": 100 * bandwidth}
    rows = grouped(step)
    made = table(summary(step, rows), rows)
    assert made.row_count == 4
    assert ("of the limit" in str(made.title)) is bool(bandwidth)
    assert ("read 32 more" in str(made.title)) is bool(prompt)


def test_the_host_is_hidden_when_it_has_to_wait():
    device = {**STEP, "on_host": False}
    busy = summary(device, grouped(device))
    assert busy["hidden"] is False and "NOT hidden" in host_line(busy)
    device["host"] = {**HOST, "wait": 0.005}
    waits = summary(device, grouped(device))
    assert waits["hidden"] is True
    assert "0.450 (inputs 0.100" in host_line(waits) and "waits 5.000 ms" in host_line(waits)
    assert "the host is the device" in host_line(summary(STEP, grouped(STEP)))


class Recorder:
    """Events as a profiler writes them, in the order of the host's calls. Microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.number, self.device = 0, 0.0

    def add(self, cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> None:
        row = {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}
        self.events.append({**row, "args": args})

    def mark(self, name: str, ts: float, dur: float) -> None:
        self.add("user_annotation", f"headrace {name}", ts, dur)

    def launch(self, ts: float, *kernels: tuple[str, float], gap: float = 1.0) -> None:
        """One call of the driver that starts these kernels."""
        self.number += 1
        self.add("vendor_runtime", "launch", ts, 0.5, correlation=self.number)
        for name, dur in kernels:
            self.device = max(self.device, ts) + gap
            self.add("kernel", name, self.device, dur, 7, correlation=self.number)
            self.device += dur


def recorded() -> list[dict[str, Any]]:
    """Two linears and a norm one by one, then two steps: a graph, then the head's linear and the sampler."""
    made = Recorder()
    made.launch(0, ("warm", 1))
    for number, (name, dur) in enumerate((("gemm", 5), ("norm", 2), ("gemm", 5))):
        made.mark(f"op {number}", 10 + 10 * number, 5)
        made.launch(11 + 10 * number, (name, dur))
    for number in range(2):
        began = 100 + 100 * number
        made.mark(f"step {number}", began, 50)
        made.mark("inputs", began, 5)
        made.launch(began + 1, ("copy", 1))
        made.mark("launch", began + 5, 5)
        made.launch(began + 6, ("gemm", 20), ("norm", 4))
        made.mark("sampling", began + 15, 20)
        made.launch(began + 16, ("gemm", 30))
        made.launch(began + 20, ("argmax", 3))
    return made.events


TRACED = {
    **STEP,
    "on_host": False,
    "step_s": 100e-6,
    "ops": [
        ["linear", "a", 100_000, 0, 0.0],
        ["rms_norm", "", 0, 0, 0.0],
        ["linear", "b", 200_000, 0, 0.0],
    ],
    "trace": recorded(),
}


def test_kernels_of_a_graph_belong_to_the_ops_that_launched_them_one_by_one():
    found = trace.read(recorded())
    assert {op: dict(names) for op, names in found.ops.items()} == {
        0: {"gemm": pytest.approx(20e-6)},
        1: {"norm": pytest.approx(4e-6)},
        2: {"gemm": pytest.approx(30e-6)},
    }
    assert {part: set(names) for part, names in found.parts.items()} == {
        "inputs": {"copy"},
        "sampling": {"argmax"},
    }
    assert found.busy == pytest.approx(58e-6) and found.period == pytest.approx(100e-6)


def test_a_traced_step_as_a_table():
    rows = grouped(TRACED)
    named = {(row["op"], row["detail"]): row for row in rows}
    assert named["linear", "b"]["seconds"] == pytest.approx(30e-6)
    assert named["linear", "b"]["of_limit"] == pytest.approx(20 / 30)
    assert named["linear", "b"]["kernels"] == [("gemm", pytest.approx(30e-6))]
    assert named["sampling", "no op"]["seconds"] == pytest.approx(3e-6)
    assert named["the device waits", "between kernels"]["seconds"] == pytest.approx(42e-6)
    assert sum(row["seconds"] for row in rows) == pytest.approx(TRACED["step_s"])
    whole = summary(TRACED, rows)
    assert whole["device_busy_s"] == pytest.approx(58e-6)
    console = Console(width=160, record=True, quiet=True)
    console.print(table(whole, rows))


def test_kernels_at_once_are_counted_once():
    made = Recorder()
    made.mark("step 0", 0, 10)
    made.launch(1, ("a", 10), ("b", 10), gap=-4.0)
    assert trace.read(made.events).busy == pytest.approx(16e-6)


def test_launches_of_other_threads_and_without_a_mark_are_left_out():
    made = Recorder()
    made.mark("step 0", 0, 10)
    made.launch(1, ("own", 10))
    made.launch(20, ("after", 10))
    made.add("vendor_runtime", "launch", 2, 0.5, tid=99, correlation=77)
    made.add("kernel", "foreign", 3, 50, 7, correlation=77)
    assert set(trace.read(made.events).parts["launch"]) == {"own"}


def test_threads_may_be_numbered_in_another_way():
    made = Recorder()
    made.mark("step 0", 0, 10)
    made.launch(1, ("own", 10))
    made.events[1]["tid"] = 140001
    assert set(trace.read(made.events).parts["launch"]) == {"own"}


def test_a_trace_without_kernels_is_refused():
    made = Recorder()
    made.mark("step 0", 0, 10)
    with pytest.raises(ValueError, match="no kernel"):
        trace.read(made.events)


def test_chrome_traces():
    assert trace.chrome(TRACED)["traceEvents"] == TRACED["trace"]
    events = trace.chrome(STEP)["traceEvents"]
    spans = [event for event in events if event.get("cat") == "step"]
    assert [(event["ts"], round(event["dur"])) for event in spans] == [
        (0, 100000),
        (100000, 200000),
    ]
    ops = [event for event in events if event.get("cat") == "op"]
    assert [event["name"] for event in ops] == [row[0] for row in STEP["ops"]]
    assert ops[1]["ts"] == pytest.approx(2000) and ops[0]["args"]["bytes"] == 10_000_000


def test_each_level_has_a_trace_of_its_own():
    assert run.with_number("a/t.json", 0, 1) == "a/t.json"
    assert [run.with_number("a/t.json", i, 2) for i in range(2)] == ["a/t-1.json", "a/t-2.json"]


def sample(first: float, last: float, tokens: int) -> Sample:
    return Sample(0.0, [first, last], last, 10, tokens)


def test_processor_time_a_step_is_taken_while_all_streams_decode():
    samples = [sample(1.0, 11.0, 101), sample(2.0, 12.0, 101)]  # 0.1 s a step
    looks = [
        (float(at), {"engine": 0.01 * at, "worker": 0.02 * at, "api": 0.5 * (at > 3) + 0.03 * at})
        for at in range(1, 14)
    ]
    found = hosts.shares(samples, looks)
    assert found is not None and found["steps"] == 90 and found["step_s"] == pytest.approx(0.1)
    assert found["engine"] == pytest.approx(1e-3) and found["worker"] == pytest.approx(2e-3)
    assert found["api"] == pytest.approx((0.5 + 0.27) / 90)
    assert "engine (plans, results, messages) 1.000" in hosts.line(found)
    assert hosts.shares(samples, looks[:2]) is None and "too soon" in hosts.line(None)
