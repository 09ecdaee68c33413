"""What every implementation of `sample` must do, whatever the reference does."""

from __future__ import annotations

import pytest
import torch

from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.queries import SampleQuery
from headrace.platforms.registry import Registry

VOCAB = 5000
NAMES = [
    row.name
    for row in Registry.with_reference(CpuPlatform().implementations()).candidates("sample")
]


@pytest.fixture(params=NAMES)
def sample(request, bind):
    op = bind("sample", SampleQuery(VOCAB, 64), request.param)

    def sample(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=None):
        rows = logits.shape[0]
        given = torch.rand(rows) if uniform is None else torch.as_tensor(uniform)
        return op(
            logits,
            torch.full((rows,), temperature),
            torch.full((rows,), top_k, dtype=torch.int32),
            torch.full((rows,), top_p),
            torch.full((rows,), min_p),
            given.expand(rows).contiguous(),
        )

    return sample


def flat(rows: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"top_p": 0.0}, {"min_p": 1.0}]
)
def test_ways_to_be_greedy(sample, options):
    logits = flat(16)
    assert torch.equal(sample(logits, **options), logits.argmax(-1))


def test_equal_logits_are_taken_by_rising_id(sample):
    logits = torch.zeros(8, VOCAB)
    uniform = (torch.arange(8) * 600 + 0.5) / VOCAB
    assert sample(logits, uniform=uniform).tolist() == [n * 600 for n in range(8)]
    assert sample(logits, temperature=0.0).tolist() == [0] * 8
    assert sample(logits, top_k=3, uniform=0.999).tolist() == [2] * 8
    # the 128th and the 129th likeliest are equal: a head of 128 must not decide which comes first
    logits = torch.zeros(1, VOCAB)
    logits[0, :127] = 9.0
    assert sample(logits, top_k=128, uniform=0.9999999).tolist() == [127]


def test_huge_top_k_and_neutral_filters_change_nothing(sample):
    logits = flat(32)
    uniform = torch.rand(32, generator=torch.Generator().manual_seed(1))
    plain = sample(logits, uniform=uniform)
    assert torch.equal(sample(logits, top_k=2**31 - 1, uniform=uniform), plain)
    assert torch.equal(sample(logits, top_k=VOCAB, uniform=uniform), plain)
    assert torch.equal(sample(logits, top_p=1.0, min_p=0.0, uniform=uniform), plain)
    assert plain.unique().numel() > 8


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2}, [0.4, 0.3]),
        ({"top_p": 0.5}, [0.4, 0.3]),
        ({"top_p": 0.65, "top_k": 3}, [0.4, 0.3]),  # 0.4/0.9 + 0.3/0.9 = 0.78 >= 0.65
        ({"min_p": 0.45}, [0.4, 0.3, 0.2]),  # 0.2 / 0.4 = 0.5
        ({"min_p": 0.45, "top_k": 2}, [0.4, 0.3]),
    ],
)
def test_frequencies_are_the_filtered_probabilities(sample, options, allowed):
    """Uniform numbers on a fine grid, so the counts are exact to the grid."""
    ids = [7, 3, 4000, 11]
    logits = torch.full((1, VOCAB), -100.0)
    logits[0, ids] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    grid = (torch.arange(2000) + 0.5) / 2000
    drawn = sample(logits.expand(2000, -1).contiguous(), uniform=grid, **options)
    total = sum(allowed)
    for position, token in enumerate(ids):
        share = (drawn == token).float().mean().item()
        want = allowed[position] / total if position < len(allowed) else 0.0
        assert abs(share - want) < 2e-3


def test_temperature_sharpens(sample):
    logits = torch.full((1, VOCAB), -100.0)
    logits[0, 5], logits[0, 9] = 1.0, 0.0
    grid = (torch.arange(1000) + 0.5) / 1000
    for temperature in (0.25, 1.0, 4.0):
        drawn = sample(logits.expand(1000, -1).contiguous(), temperature=temperature, uniform=grid)
        want = 1 / (1 + torch.tensor(-1 / temperature).exp().item())
        assert abs((drawn == 5).float().mean().item() - want) < 2e-3


def test_a_row_does_not_depend_on_its_batch(sample):
    logits, uniform = flat(24, seed=5, scale=0.3), torch.rand(24)
    together = sample(logits, temperature=1.5, top_p=0.99, uniform=uniform)
    for row in range(24):
        alone = sample(
            logits[row : row + 1], temperature=1.5, top_p=0.99, uniform=uniform[row : row + 1]
        )
        assert alone.item() == together[row].item()


def test_masked_tokens_are_never_drawn(sample):
    logits = flat(64, seed=2)
    logits[:, 100:] = float("-inf")
    assert sample(logits, uniform=torch.linspace(0, 0.9999999, 64)).max() < 100


def test_rows_that_are_not_finite_give_some_id_and_harm_no_other(sample):
    logits = flat(4, seed=3)
    logits[1], logits[2] = torch.nan, float("-inf")
    uniform = torch.tensor([0.1, 0.5, 0.9, 0.7])
    for options in ({}, {"top_k": 5, "top_p": 0.5}, {"min_p": 0.5}):
        drawn = sample(logits, uniform=uniform, **options)
        assert ((drawn >= 0) & (drawn < VOCAB)).all()
        clean = sample(logits[[0, 3]], uniform=uniform[[0, 3]], **options)
        assert drawn[[0, 3]].tolist() == clean.tolist()


def test_the_logits_are_left_alone(sample):
    logits = flat(4)
    before = logits.clone()
    sample(logits, temperature=0.7, top_k=50, top_p=0.9)
    assert torch.equal(logits, before)


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
