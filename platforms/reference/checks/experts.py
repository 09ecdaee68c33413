"""Mixture of experts: a token's answer does not depend on the others."""

from __future__ import annotations

import torch

from headrace.platforms.queries import ExpertsQuery
from headrace.platforms.reference.checks.base import Make, OpCheck, close

E, K, H, INNER = 6, 3, 64, 96


def batch_mates_do_not_matter(make: Make, dtype: str) -> None:
    """A token's sum is taken in the same order whoever else is in the step."""
    op = make(ExpertsQuery(E, K, H, INNER, dtype))
    device, tokens = op.runtime.device, 40
    generator = torch.Generator().manual_seed(tokens)

    def drawn(*shape: int, spread: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator) * spread
        return values.to(device, getattr(torch, dtype))

    w13, w2 = drawn(E, 2 * INNER, H, spread=H**-0.5), drawn(E, H, INNER, spread=INNER**-0.5)
    x = drawn(tokens, H)
    ids = torch.rand(tokens, E, generator=generator).argsort(1)[:, :K].int().to(device)
    weights = torch.rand(tokens, K, generator=generator).to(device)
    packed = op.pack(w13, w2)
    together = op(x, weights, ids, packed)
    alone = [op(x[t : t + 1], weights[t : t + 1], ids[t : t + 1], packed) for t in range(tokens)]
    close(torch.cat(alone), together, dtype, "each token alone and all together")


CHECKS: dict[str, OpCheck] = {"batch mates do not matter": batch_mates_do_not_matter}
