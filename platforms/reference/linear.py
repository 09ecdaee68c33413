"""Linear and embedding over weights kept as they came. Contracts: headrace.platforms.linear."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from headrace.platforms.linear import EmbeddingImpl, LinearImpl

Packed = tuple[torch.Tensor, "torch.Tensor | None"]


class ReferenceLinear(LinearImpl):
    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        dtype = getattr(torch, self.query.dtype)
        return weight.to(dtype), None if bias is None else bias.to(dtype)

    def __call__(
        self, x: torch.Tensor, packed: Packed, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = F.linear(x, *packed)
        if out is not None:
            return out.copy_(y)
        return y.to(getattr(torch, self.query.out_dtype)) if self.query.out_dtype else y


class ReferenceEmbedding(EmbeddingImpl):
    def pack(self, weight: Any) -> torch.Tensor:
        table: torch.Tensor = weight.to(getattr(torch, self.query.dtype))
        return table

    def __call__(self, ids: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(ids, packed)
        return rows if self.query.scale == 1.0 else rows * self.query.scale
