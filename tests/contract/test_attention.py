"""Paged attention beyond the generated cases: chunks, batches, skipped slots, long contexts, KV formats."""

from __future__ import annotations

import pytest
import torch

from headrace.platforms.cpu import attention as cpu_attention
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.reference.checks.attention import CHECKS, Sequence, make_query
from headrace.platforms.reference.checks.base import NothingToCheck
from headrace.platforms.registry import Registry, SelectionError

NAMES = [
    row.name
    for row in Registry.with_reference(CpuPlatform().implementations()).candidates(
        "paged_attention"
    )
]


@pytest.fixture(params=NAMES)
def make(request, maker):
    return maker("paged_attention", request.param)


@pytest.mark.parametrize("check", CHECKS)
def test_check(make, check):
    try:
        CHECKS[check](make, "float32")
    except (SelectionError, NothingToCheck) as reason:
        pytest.skip(str(reason))


def test_small_pieces_equal_large_ones(make, monkeypatch):
    """The bounds on masks, scores and gathered keys only cut the work."""
    for options in ({}, {"window": 20}, {"softcap": 5.0}, {"window": 20, "softcap": 5.0}):
        try:
            op = make(make_query("float32", **options))
        except SelectionError as error:
            pytest.skip(str(error))
        whole = Sequence(op, 130).run(60, 127, 128, 129)
        with monkeypatch.context() as patch:
            for name, value in (
                ("MASK_BUDGET", 1000),
                ("SCORE_BUDGET", 4000),
                ("KEY_BUDGET", 3000),
                ("WINDOW_STEP", 7),
            ):
                patch.setattr(cpu_attention, name, value)
            patch.setattr("headrace.platforms.reference.attention.SCORE_BUDGET", 5000)
            cut = Sequence(op, 130).run(60, 127, 128, 129)
        torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-5)
