"""Mixture of experts, one expert at a time. Contracts: headrace.platforms.ops and headrace.platforms.linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.linear import ExpertsImpl
from headrace.platforms.queries import RouterQuery
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


class ReferenceRouter:
    """topk_softmax(logits, top_k, renormalize[, bias]) with the query's options."""

    def __init__(self, query: RouterQuery, runtime: DeviceRuntime) -> None:
        self.query = query

    def __call__(
        self,
        logits: torch.Tensor,
        top_k: int,
        renormalize: bool,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query = self.query
        if query.plain:
            return topk_softmax(logits, top_k, renormalize)
        sigmoid = query.scoring == "sigmoid"
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        # logits are in the order of their softmax, small ones too
        choice = scores if sigmoid or bias is not None else logits
        if bias is not None:
            choice = choice + bias
        if query.groups > 1:
            choice = self._within_groups(choice, 1 if bias is None else 2)
        ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        weights = scores.gather(1, ids)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * query.scale, ids.int()

    def _within_groups(self, choice: torch.Tensor, best: int) -> torch.Tensor:
        """-inf for experts outside of the groups whose `best` largest have the largest sums."""
        groups = choice.unflatten(1, (self.query.groups, -1))
        sums = groups.topk(best, dim=-1).values.sum(-1)
        order = sums.sort(dim=-1, descending=True, stable=True).indices
        out = torch.ones_like(sums, dtype=torch.bool)
        out.scatter_(1, order[:, : self.query.top_groups], False)
        return groups.masked_fill(out.unsqueeze(-1), float("-inf")).flatten(1)


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
