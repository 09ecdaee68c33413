"""bench profile: what /debug/step answers, as a table."""

from __future__ import annotations

import pytest

from headrace.cli.bench.profile import grouped, summary, table

STEP = {
    "requests": 4,
    "context": 256,
    "step_s": 0.010,
    "bandwidth": 10e9,
    "ops": [
        ["linear", "64x64 Q4_0", 10_000_000, 0.002],
        ["rms_norm", "", 0, 0.001],
        ["linear", "64x64 Q4_0", 10_000_000, 0.002],
        ["linear", "64x99 Q8_0", 30_000_000, 0.003],
    ],
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
    assert first["of_limit"] == pytest.approx(0.5) and second["of_limit"] == pytest.approx(1.0)
    assert norm["of_limit"] is None and rest["seconds"] == pytest.approx(0.002)


def test_a_step_against_the_limit():
    whole = summary(STEP)
    assert whole["weight_bytes"] == 50_000_000 and whole["limit_s"] == pytest.approx(0.005)
    assert whole["of_limit"] == pytest.approx(0.5) and whole["tokens_per_s"] == pytest.approx(400)
    blind = summary({**STEP, "bandwidth": 0.0})
    assert blind["limit_s"] is None and blind["of_limit"] is None


def test_ops_slower_alone_than_in_the_step_leave_no_negative_rest():
    assert grouped({**STEP, "step_s": 0.001})[-1]["seconds"] == 0.0


@pytest.mark.parametrize("bandwidth", [0.0, 10e9])
def test_the_table_can_be_drawn(bandwidth):
    step = {**STEP, "bandwidth": bandwidth}
    made = table(step, grouped(step))
    assert made.row_count == 4
    assert ("of the limit" in str(made.title)) is bool(bandwidth)
