"""What every implementation of `sample` must do, whatever the reference does."""

from __future__ import annotations

import pytest
import torch

from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.queries import SampleQuery
from headrace.platforms.reference.checks.sampling import CHECKS
from headrace.platforms.registry import Registry, SelectionError

NAMES = [
    row.name
    for row in Registry.with_reference(CpuPlatform().implementations()).candidates("sample")
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_check(maker, name, check):
    try:
        CHECKS[check](maker("sample", name), "float32")
    except SelectionError as error:
        pytest.skip(str(error))


def test_any_mixture_of_options_gives_what_the_reference_gives(bind):
    """Ties, masks, tiny and large vocabularies, options at their ends; the same uniform numbers."""
    import random

    from headrace.platforms.reference.sampling import sample as truth

    choose, torch_seed = random.Random(0).choice, torch.manual_seed(0)
    for vocab in (2, 5, 127, 128, 129, 500, 5000):
        op = bind("sample", SampleQuery(vocab, 8), "torch")
        for scale in (0.0, 0.1, 1.0, 3.0, 10.0):
            logits = torch.randn(8, vocab, generator=torch_seed) * scale
            logits[2:4] = (logits[2:4] * 4).round() / 4
            logits[4:6, vocab // 2 :] = float("-inf")

            def column(*values: float) -> torch.Tensor:
                return torch.tensor([choose(values) for _ in range(8)])

            options = (
                column(0.0, 0.3, 1.0, 2.0, 10.0),
                column(0, 1, 2, 50, 127, 128, 129, vocab - 1, vocab, 10**9).int(),
                column(1.0, 0.99, 0.9, 0.5, 1e-6, 0.0),
                column(0.0, 0.0, 0.01, 0.5, 1.0),
                torch.rand(8, generator=torch_seed),
            )
            assert torch.equal(op(logits, *options), truth(logits, *options))


@pytest.mark.parametrize("vocab", [2, 17, 500, 5000])
def test_guarded_rows_with_a_number_that_is_not_finite_have_no_token(bind, vocab):
    try:
        op = bind("sample", SampleQuery(vocab, 8), "native")
    except SelectionError as error:
        pytest.skip(str(error))
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, vocab + 3, generator=generator)[:, 1 : vocab + 1]
    uniform = torch.rand(8, generator=generator)
    rest = (torch.zeros(8, dtype=torch.int32), torch.full((8,), 0.9), torch.zeros(8), uniform)
    for greedy in (True, False):
        temperature = torch.zeros(8) if greedy else torch.tensor([0.0, 1.0] * 4)
        want = op(logits, temperature, *rest)
        got = op.guarded(logits, temperature, *rest, greedy)
        assert got.dtype == torch.int32 and torch.equal(got.long(), want)
        spoilt = logits.clone()
        for row, bad in ((1, torch.nan), (2, torch.inf), (4, -torch.inf), (5, torch.nan)):
            spoilt[row, (row * 7919) % vocab] = bad
        got = op.guarded(spoilt, temperature, *rest, greedy)
        assert (got[[1, 2, 4, 5]] == -1).all()
        assert torch.equal(got[[0, 3, 6, 7]].long(), want[[0, 3, 6, 7]])
