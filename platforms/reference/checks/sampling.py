"""What every implementation of `sample` must do, whatever the reference does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from headrace.platforms.queries import SampleQuery
from headrace.platforms.reference.checks.base import Make, OpCheck, require, same

VOCAB = 5000
DRAWS = 600  # of one distribution: each share is then right to 1 / 600 < 2e-3
FOUR = [0.4, 0.3, 0.2, 0.1]
# options -> the probabilities that they leave of FOUR
FILTERS: tuple[tuple[dict[str, float], list[float]], ...] = (
    ({}, FOUR),
    ({"top_k": 2}, FOUR[:2]),
    ({"top_p": 0.5}, FOUR[:2]),
    ({"top_p": 0.65, "top_k": 3}, FOUR[:2]),  # 0.4/0.9 + 0.3/0.9 = 0.78 >= 0.65
    ({"min_p": 0.45}, FOUR[:3]),  # 0.2 / 0.4 = 0.5
    ({"min_p": 0.45, "top_k": 2}, FOUR[:2]),
)
GREEDY: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_p": 1e-9},
    {"top_p": 0.0},
    {"min_p": 1.0},
)


def sampler(op: Any, device: torch.device) -> Callable[..., torch.Tensor]:
    """sample(logits on the host, one number an option, uniform) -> ids on the host."""

    def sample(
        logits: torch.Tensor,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        uniform: Any = None,
    ) -> torch.Tensor:
        rows = logits.shape[0]
        given = torch.rand(rows) if uniform is None else torch.as_tensor(uniform)
        ids: torch.Tensor = op(
            logits.to(device),
            torch.full((rows,), temperature, device=device),
            torch.full((rows,), top_k, dtype=torch.int32, device=device),
            torch.full((rows,), top_p, device=device),
            torch.full((rows,), min_p, device=device),
            given.expand(rows).contiguous().to(device),
        )
        return ids.cpu()

    return sample


def flat(rows: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def ways_to_be_greedy(sample: Any) -> None:
    logits = flat(16)
    for options in GREEDY:
        same(sample(logits, **options), logits.argmax(-1), f"{options} and the largest logit")


def equal_logits_are_taken_by_rising_id(sample: Any) -> None:
    logits = torch.zeros(8, VOCAB)
    uniform = (torch.arange(8) * 600 + 0.5) / VOCAB
    same(sample(logits, uniform=uniform), torch.arange(8) * 600, "drawn ids and their order")
    same(sample(logits, temperature=0.0), torch.zeros(8).long(), "greedy and the lowest id")
    kept = sample(logits, top_k=3, uniform=0.999)
    same(kept, torch.full((8,), 2), "the last of three and id 2")
    # the 128th and the 129th likeliest are equal: a head of 128 must not decide which comes first
    logits = torch.zeros(1, VOCAB)
    logits[0, :127] = 9.0
    last = sample(logits, top_k=128, uniform=0.9999999)
    same(last, torch.tensor([127]), "the 128th likeliest and id 127")


def huge_top_k_and_neutral_filters_change_nothing(sample: Any) -> None:
    logits = flat(32)
    uniform = torch.rand(32, generator=torch.Generator().manual_seed(1))
    plain = sample(logits, uniform=uniform)
    for options in ({"top_k": 2**31 - 1}, {"top_k": VOCAB}, {"top_p": 1.0, "min_p": 0.0}):
        same(sample(logits, uniform=uniform, **options), plain, f"{options} and no filter")
    require(plain.unique().numel() > 8, "32 unlike uniform numbers give few unlike tokens")


def frequencies_are_the_filtered_probabilities(sample: Any, case: int) -> None:
    """Uniform numbers on a fine grid, so the counts are exact to the grid."""
    options, allowed = FILTERS[case]
    ids = [7, 3, 4000, 11]
    logits = torch.full((1, VOCAB), -100.0)
    logits[0, ids] = torch.tensor(FOUR).log()
    grid = (torch.arange(DRAWS) + 0.5) / DRAWS
    drawn = sample(logits.expand(DRAWS, -1).contiguous(), uniform=grid, **options)
    for position, token in enumerate(ids):
        share = (drawn == token).float().mean().item()
        want = allowed[position] / sum(allowed) if position < len(allowed) else 0.0
        require(abs(share - want) < 2e-3, f"token {token} has {share:.4f} instead of {want:.4f}")


def temperature_sharpens(sample: Any) -> None:
    logits = torch.full((1, VOCAB), -100.0)
    logits[0, 5], logits[0, 9] = 1.0, 0.0
    grid = (torch.arange(DRAWS) + 0.5) / DRAWS
    for temperature in (0.25, 1.0, 4.0):
        drawn = sample(logits.expand(DRAWS, -1).contiguous(), temperature=temperature, uniform=grid)
        share, want = (drawn == 5).float().mean().item(), 1 / (1 + math.exp(-1 / temperature))
        require(abs(share - want) < 2e-3, f"at {temperature}: {share:.4f} instead of {want:.4f}")


def a_row_does_not_depend_on_its_batch(sample: Any) -> None:
    logits = flat(24, seed=5, scale=0.3)
    uniform = torch.rand(24, generator=torch.Generator().manual_seed(2))
    options = {"temperature": 1.5, "top_p": 0.99}
    together = sample(logits, uniform=uniform, **options)
    alone = [sample(logits[r : r + 1], uniform=uniform[r : r + 1], **options) for r in range(24)]
    same(torch.cat(alone), together, "rows alone and together")


def masked_tokens_are_never_drawn(sample: Any) -> None:
    logits = flat(64, seed=2)
    logits[:, 100:] = float("-inf")
    drawn = sample(logits, uniform=torch.linspace(0, 0.9999999, 64))
    require(int(drawn.max()) < 100, f"token {int(drawn.max())} was drawn and is masked")


def rows_that_are_not_finite_give_some_id_and_harm_no_other(sample: Any) -> None:
    logits = flat(4, seed=3)
    logits[1], logits[2] = torch.nan, float("-inf")
    uniform = torch.tensor([0.1, 0.5, 0.9, 0.7])
    for options in ({}, {"top_k": 5, "top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}):
        drawn = sample(logits, uniform=uniform, **options)
        within = ((drawn >= 0) & (drawn < VOCAB)).all()
        require(bool(within), f"ids {drawn.tolist()} are not within the vocabulary")
        clean = sample(logits[[0, 3]], uniform=uniform[[0, 3]], **options)
        same(drawn[[0, 3]], clean, "finite rows with others and alone")


def _with_sampler(body: Callable[..., None], **options: Any) -> OpCheck:
    def check(make: Make, dtype: str) -> None:
        body(sampler(make(SampleQuery(VOCAB, 64)), make.runtime.device), **options)

    return check


def the_logits_are_left_alone(make: Make, dtype: str) -> None:
    op, device = make(SampleQuery(VOCAB, 64)), make.runtime.device
    logits = flat(4).to(device)
    before = logits.clone()
    numbers = (torch.full((4,), value, device=device) for value in (0.7, 50.0, 0.9, 0.0, 0.5))
    temperature, top_k, top_p, min_p, uniform = numbers
    op(logits, temperature, top_k.int(), top_p, min_p, uniform)
    same(logits, before, "the logits before and after")


CHECKS: dict[str, OpCheck] = {
    "ways to be greedy": _with_sampler(ways_to_be_greedy),
    "equal logits are taken by rising id": _with_sampler(equal_logits_are_taken_by_rising_id),
    "neutral filters change nothing": _with_sampler(huge_top_k_and_neutral_filters_change_nothing),
    **{
        f"frequencies are the filtered probabilities: {options or 'no filter'}": _with_sampler(
            frequencies_are_the_filtered_probabilities, case=i
        )
        for i, (options, _) in enumerate(FILTERS)
    },
    "temperature sharpens": _with_sampler(temperature_sharpens),
    "a row does not depend on its batch": _with_sampler(a_row_does_not_depend_on_its_batch),
    "masked tokens are never drawn": _with_sampler(masked_tokens_are_never_drawn),
    "rows that are not finite harm no other": _with_sampler(
        rows_that_are_not_finite_give_some_id_and_harm_no_other
    ),
    "the logits are left alone": the_logits_are_left_alone,
}
