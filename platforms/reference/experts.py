"""Mixture of experts, one expert at a time. Contracts: headrace.platforms.ops and headrace.platforms.linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.platforms.linear import ExpertsImpl
from headrace.platforms.reference import ops

GATED = {
    "silu": ops.silu_and_mul,
    "gelu_tanh": ops.gelu_tanh_and_mul,
    "gelu": ops.gelu_and_mul,
}

Packed = tuple[torch.Tensor, torch.Tensor]


def topk_softmax(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    # topk promises nothing about equal values; a stable sort keeps the lower id first
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(-1).gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.int()


class ReferenceExperts(ExpertsImpl):
    def pack(self, w13: torch.Tensor, w2: torch.Tensor) -> Packed:
        dtype = getattr(torch, self.query.dtype)
        return w13.to(dtype), w2.to(dtype)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Packed
    ) -> torch.Tensor:
        activation = GATED[self.query.activation]
        out = x.new_zeros(x.shape, dtype=torch.float32)
        for expert, (w13, w2) in enumerate(zip(*packed, strict=True)):
            tokens, place = (ids == expert).nonzero(as_tuple=True)
            if len(tokens):
                y = F.linear(activation(F.linear(x[tokens], w13)), w2).float()
                out[tokens] += y * weights[tokens, place].unsqueeze(1)
        return out.to(x.dtype)
