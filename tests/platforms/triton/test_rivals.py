"""Which implementation of attention wins, by a timer that knows how long each one takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace.platforms import tuned
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.ops import Ops
from headrace.platforms.queries import AttentionQuery, NormQuery
from headrace.platforms.reference.attention import ReferenceAttention
from headrace.platforms.registry import (
    MEASURED,
    Implementation,
    Policy,
    Registry,
    Requirement,
    Verdict,
)
from headrace.platforms.triton import rivals

QUERY = AttentionQuery(4, 2, 32, 32, "float32", "float32", 32**-0.5)
DOUBT = Verdict("unverified", ("never run here",))
NEVER = Verdict("no", ("heads of 32",))


class _Named(ReferenceAttention):
    """Says of each call whose it is."""

    last = ""

    def attend(self, *arguments: Any, **named: Any) -> torch.Tensor:
        _Named.last = type(self).__name__
        return super().attend(*arguments, **named)


class Used(_Named):
    pass


class Quick(_Named):
    pass


class Wrong(_Named):
    def attend(self, *arguments: Any, **named: Any) -> torch.Tensor:
        return super().attend(*arguments, **named) + 1.0


def registry() -> Registry:
    rows = [("Used", 50, Verdict("yes")), ("Quick", 40, DOUBT), ("Wrong", 30, DOUBT)]
    rows += [("Unable", 20, NEVER), ("Gone", 10, Verdict("yes"))]
    needs = (Requirement("torch"),)
    return Registry.with_reference(
        Implementation(
            rivals.OP,
            name,
            f"{__name__}:{name}",
            rank,
            needs,
            lambda q, d, verdict=verdict: verdict,  # type: ignore[misc]
        )
        for name, rank, verdict in rows
    )


@pytest.fixture
def runtime(monkeypatch):
    monkeypatch.setattr(rivals, "LOADS", ((2, 9, 1), (1, 5, 5)))
    opened = CpuPlatform().open(CpuPlatform.describe("portable"))
    yield opened
    opened.close()


def held(
    runtime: Any, times: dict[str, list[float]], policy: Policy | None = None
) -> dict[str, rivals.Contest]:
    """`times`: seconds by implementation, the next ones of each measurement, the last one for ever."""

    def timer(calls: Any) -> tuple[float, None]:
        assert len(calls) >= 2
        for call in calls[:2]:
            assert bool(call().isfinite().all())
        row = times[_Named.last]
        return (row.pop(0) if len(row) > 1 else row[0]), None

    asked = [("rms_norm", NormQuery(64, "float32")), (rivals.OP, QUERY), (rivals.OP, QUERY)]
    asked.append((rivals.OP, replace(QUERY, kv_heads=1, head_dim=48, latent=True)))
    found = rivals.contests(asked, registry(), policy or Policy(), runtime, timer)
    return {one.rival: one for one in found}


def test_the_faster_one_wins_and_the_others_say_why_not(runtime):
    found = held(runtime, {"Used": [1.0], "Quick": [0.8]})
    quick = found["Quick"]
    assert quick.won and quick.used == "Used" and not quick.note
    assert (quick.now, quick.took) == ([1.0, 1.0], [0.8, 0.8])
    assert "self-test failed" in found["Wrong"].note and "Gone" in found["Gone"].note
    assert not found["Wrong"].won and found.keys() == {"Quick", "Wrong", "Gone"}


@pytest.mark.parametrize(
    ("took", "why"),
    [
        ([0.98], "less than the margin"),
        ([0.5, 1.1], "slower in one load"),
        ([0.5, 0.5, 1.0], "luck is not repeated"),
    ],
)
def test_what_is_not_faster_does_not_win(runtime, took, why):
    assert not held(runtime, {"Used": [1.0], "Quick": took})["Quick"].won, why


def test_what_the_user_forced_is_not_compared(runtime):
    times = {"Used": [1.0], "Quick": [0.8]}
    assert not held(runtime, times, policy=Policy(force={rivals.OP: "Used"}))
    none = held(runtime, times, policy=Policy(disable=frozenset({"Quick"})))
    assert "Quick" not in none


def test_a_start_takes_what_won(runtime):
    """And finds out by the next measurement when that has changed."""
    (requirement,) = (
        row.requires for row in registry().candidates(rivals.OP) if row.name == "Quick"
    )
    runtime.tuned = {tuned.key(rivals.OP, QUERY, {}): tuned.choice("Quick", requirement)}
    ops = Ops(registry(), runtime.info, runtime)
    assert type(ops.bind(rivals.OP, QUERY)).__name__ == "Quick"
    assert type(ops.bind(rivals.OP, replace(QUERY, window=7))).__name__ == "Used"
    (row,) = (row for row in ops.report.decisions[0].candidates if row.name == "Quick")
    assert row.reasons[0] == MEASURED and "self-test passed" in row.reasons[-1]
    found = held(runtime, {"Used": [0.5], "Quick": [0.8]})
    assert found["Used"].used == "Quick" and found["Used"].won
