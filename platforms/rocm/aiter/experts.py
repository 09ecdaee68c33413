"""Mixture of experts and its router by AITER. Contracts: headrace.platforms.linear and headrace.platforms.ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.linear import ExpertsImpl
from headrace.platforms.queries import ExpertsQuery, RouterQuery
from headrace.platforms.rocm.aiter import vendor
from headrace.platforms.rocm.aiter.rows import padded_intermediate

Packed = tuple[torch.Tensor, torch.Tensor]
# Tiles of the matrix instructions that weights are put in the order of.
TILE = (16, 16)


class AiterExperts(ExpertsImpl):
    def __init__(self, query: ExpertsQuery, runtime: DeviceRuntime) -> None:
        super().__init__(query, runtime)
        self._call = vendor.find("fused_moe")
        self._shuffle = vendor.find("shuffle_weight")
        self._silu = vendor.find("ActivationType").Silu
        self._plain = vendor.find("QuantType").No

    def pack(self, w13: torch.Tensor, w2: torch.Tensor) -> Packed:
        """Widened with zeros to what AITER wants, which changes no result, and put in the order of its tiles."""
        dtype = getattr(torch, self.query.dtype)
        w13, w2 = w13.to(dtype), w2.to(dtype)
        more = padded_intermediate(self.query.intermediate) - self.query.intermediate
        if more:
            experts, rows, hidden = w13.shape
            halves = F.pad(w13.view(experts, 2, rows // 2, hidden), (0, 0, 0, more))
            w13, w2 = halves.flatten(1, 2), F.pad(w2, (0, more))
        return self._shuffle(w13.contiguous(), TILE), self._shuffle(w2.contiguous(), TILE)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Packed
    ) -> torch.Tensor:
        if not x.shape[0]:
            return torch.empty_like(x)
        w13, w2 = packed
        y: torch.Tensor = self._call(
            x.contiguous(),
            w13,
            w2,
            weights.contiguous(),
            ids.contiguous(),
            activation=self._silu,
            quant_type=self._plain,
        )
        return y


def topk_softmax_of(
    query: RouterQuery, runtime: DeviceRuntime
) -> Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]:
    """The router's function."""
    call = vendor.find("topk_softmax")

    def topk_softmax(
        logits: torch.Tensor, top_k: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (logits.shape[0], top_k)
        weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
        ids, rows = (torch.empty(shape, dtype=torch.int32, device=logits.device) for _ in range(2))
        if shape[0]:
            call(weights, ids, rows, logits.contiguous(), renormalize)
        return weights, ids

    return topk_softmax
