"""Tuning: which launch options win, within the time given, by a timer that knows how long each one takes."""

from __future__ import annotations

import os
import subprocess
import sys
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace.platforms import tuned
from headrace.platforms.queries import (
    ActivationQuery,
    AttentionQuery,
    ExpertsQuery,
    LinearQuery,
    NormQuery,
)
from headrace.platforms.triton import tuning
from headrace.platforms.triton.linear import row_options
from headrace.platforms.triton.tuning import Outcome, Subject, subjects, tune
from tests.platforms.triton.test_interpreter import ROOT, missing

CURRENT = {"BLOCK_N": 4, "num_warps": 4}
CANDIDATES = [{"BLOCK_N": n, "num_warps": w} for n in (2, 4, 8) for w in (2, 4)]


class Clock:
    """A second for every measurement."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Timer:
    """Seconds by the options that the op was made with; results of 1 unless told otherwise."""

    def __init__(self, times: Any, results: Any = lambda options: 1.0) -> None:
        self.times, self.results = times, results
        self.clock = Clock()
        self.asked: list[tuple[int, int]] = []

    def __call__(self, calls: Any) -> tuple[float, torch.Tensor]:
        self.clock.now += 1.0
        options = calls[0]()
        self.asked.append((options["BLOCK_N"], options["num_warps"]))
        took = self.times(*self.asked[-1])
        if took is None:
            raise RuntimeError("out of resource: shared memory\nmore of it")
        return took, torch.full((3,), self.results(self.asked[-1]))


def subject(key: str = "k", operands: Any = lambda: None) -> Subject:
    def make(runtime: Any, _operands: Any) -> list[Any]:
        return [lambda: runtime.tuned[key]]

    return Subject("row", "1 x 1", "1 token", key, CURRENT, CANDIDATES, operands, make)


def tuned_by(timer: Timer, *asked: Subject, seconds: float = 100.0) -> list[Outcome]:
    runtime: Any = SimpleNamespace(tuned=MappingProxyType({}))
    return list(tune(asked or (subject(),), runtime, timer, seconds, clock=timer.clock))


def test_the_fastest_wins_and_is_timed_twice():
    timer = Timer(lambda n, warps: n + warps)
    (found,) = tuned_by(timer)
    assert found.options == {"BLOCK_N": 2, "num_warps": 2}
    assert (found.now, found.best, found.tried) == (8, 4, 5)
    assert timer.asked[0] == (4, 4) and timer.asked[-2:] == [(4, 4), (2, 2)]
    # one change first, then two
    assert set(timer.asked[1:4]) == {(2, 4), (8, 4), (4, 2)}
    assert len(set(timer.asked)) == len(CANDIDATES)


def test_a_small_gain_is_none():
    (found,) = tuned_by(Timer(lambda n, warps: 0.98 if n == 8 else 1.0))
    assert found.options == {} and found.best == found.now == 1.0


def test_luck_is_not_repeated():
    seen = []

    def times(n: int, warps: int) -> float:
        seen.append((n, warps))
        return 0.5 if seen.count((n, warps)) == 1 and n == 8 else 1.0

    (found,) = tuned_by(Timer(times))
    assert found.options == {}


def test_what_fails_or_gives_something_else_loses():
    def times(n: int, warps: int) -> float | None:
        return None if n == 8 else n + warps

    (found,) = tuned_by(Timer(times, lambda asked: 1.5 if asked[1] == 2 else 1.0))
    assert found.options == {"BLOCK_N": 2, "num_warps": 4}
    (found,) = tuned_by(Timer(lambda n, w: n, lambda asked: float("nan") if asked[0] == 2 else 1.0))
    assert found.options == {}


def test_time_is_shared_and_never_exceeded_by_more_than_a_few_measurements():
    names = ("a", "b", "c")
    timer = Timer(lambda n, warps: n + warps)
    found = tuned_by(timer, *map(subject, names), seconds=9)
    assert [one.subject.key for one in found] == list(names)
    assert all(1 <= one.tried < 5 for one in found[:2]) and timer.clock.now <= 9 + 3 * 3
    timer = Timer(lambda n, warps: n + warps)
    found = tuned_by(timer, *map(subject, names), seconds=2)
    assert found[-1].note == "no time left" and found[-1].options is None
    # what one does not use is for those behind it
    timer = Timer(lambda n, warps: n + warps)
    assert [one.tried for one in tuned_by(timer, *map(subject, names), seconds=30)] == [5, 5, 5]


def test_one_that_cannot_be_measured_does_not_end_the_others():
    def operands() -> None:
        raise RuntimeError("out of memory: 3 GiB\nmore")

    timer = Timer(lambda n, warps: None if timer.clock.now == 1 else n + warps)
    found = tuned_by(timer, subject("a"), subject("b", operands), subject("c"))
    assert found[0].note == "not measured: out of resource: shared memory"
    assert found[1].note == "not measured: out of memory: 3 GiB"
    assert found[2].options == {"BLOCK_N": 2, "num_warps": 2}


class Runtime:
    """As much of one as ops look at when they are made."""

    info = SimpleNamespace(features=frozenset({"pdl"}), units=8)
    device = torch.device("cpu")
    tuned = MappingProxyType({})

    def kernel_options(self, kernel: str, query: Any, options: Any) -> dict[str, Any]:
        return {"num_warps": 8} if kernel == "row" else {}


def test_subjects_of_a_model():
    queries = [
        ("rms_norm", NormQuery(64, "bfloat16")),
        ("linear", LinearQuery(4096, 6144, "bfloat16")),
        ("linear", LinearQuery(4096, 6144, "bfloat16")),
        ("linear", LinearQuery(4096, 28672, "bfloat16")),
        ("silu_and_mul", ActivationQuery(14336, "bfloat16")),
        ("paged_attention", AttentionQuery(32, 8, 128, 128, "bfloat16", "bfloat16", 0.1)),
        ("fused_experts", ExpertsQuery(128, 8, 2048, 768, "bfloat16")),
    ]
    runtime: Any = Runtime()
    made = subjects(queries, runtime)
    kernels = [one.kernel for one in made]
    assert kernels.count("row") == kernels.count("gated_row") == 1
    assert kernels.count("few_rows") == 2 * 4
    assert kernels.count("experts_gate_up") == kernels.count("experts_down") == 4
    assert {"decode", "prefill", "experts_gate_up_row", "experts_down_row"} <= set(kernels)
    assert "rms_norm" not in kernels and len({one.key for one in made}) == len(made)
    row = made[0]
    assert row.current["num_warps"] == 8  # as the device wants it
    assert all(set(candidate) == set(row.current) for candidate in row.candidates)
    loads = [int(one.load.split()[0]) for one in made if one.kernel == "experts_down"]
    assert len(loads) == 4 and loads == sorted(set(loads))  # one for each height of a tile


def test_what_was_tuned_is_what_a_start_takes_and_the_next_tuning_begins_from():
    query = LinearQuery(4096, 6144, "bfloat16")
    runtime: Any = Runtime()
    before, *few = subjects([("linear", query)], runtime)
    options = {"BLOCK_N": 8, "BLOCK_K": 512, "num_warps": 2}
    assert before.current != options and options in before.candidates
    runtime.tuned = {before.key: options}
    assert options.items() <= row_options(query, runtime).items()
    after = subjects([("linear", query)], runtime)[0]
    assert (after.key, after.current) == (before.key, options)
    assert few[0].current["BLOCK_N"] == 0  # the library's
    assert all(one["BLOCK_N"] and one["SPLITS"] for one in few[0].candidates)


def test_every_space_is_of_names_that_a_file_may_hold():
    assert {name for space in tuning.SPACES.values() for name in space} <= set(tuned.NAMES)


PROGRAM = """
import torch
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.queries import LinearQuery
from headrace.platforms.triton import tuning
tuning.READ_BYTES = tuning.CALLS = tuning.REPLAYS = tuning.ROUNDS = 1
tuning.SPACES = {"row": {"BLOCK_N": (2, 4), "BLOCK_K": (32, 64)}}
runtime = CpuPlatform().open(CpuPlatform.probe()[0])
asked = tuning.subjects([("linear", LinearQuery(64, 16, "float32"))], runtime)
(found,) = tuning.tune(asked[:1], runtime, tuning.GraphTimer(runtime), 60)
assert found.now > 0 and found.tried >= 3 and not found.note, found
"""


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
def test_kernels_are_launched_and_timed():
    """In the interpreter, where times mean nothing."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
