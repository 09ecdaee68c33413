"""Linear layers over weights in the matrix units' own format. Contract: headrace.platforms.linear."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from headrace.platforms.linear import LinearImpl

FRACTAL_NZ = 29  # ACL's number: tiles of 16 x 16 numbers, rows within a tile, columns of tiles


class NzLinear(LinearImpl):
    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        dtype = getattr(torch, self.query.dtype)
        packed = torch.ops.npu.npu_format_cast(weight.to(dtype).contiguous(), FRACTAL_NZ)
        return packed, None if bias is None else bias.to(dtype)

    def __call__(
        self, x: torch.Tensor, packed: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = F.linear(x, *packed)
        if out is not None:
            return out.copy_(y)
        return y.to(getattr(torch, self.query.out_dtype)) if self.query.out_dtype else y
