"""Linear layers by AITER's table of tuned products. Contract: headrace.platforms.linear."""

from __future__ import annotations

from typing import Any

import torch

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.linear import LinearImpl
from headrace.platforms.queries import LinearQuery
from headrace.platforms.rocm.aiter import vendor


class AiterLinear(LinearImpl):
    def __init__(self, query: LinearQuery, runtime: DeviceRuntime) -> None:
        super().__init__(query, runtime)
        self._call = vendor.find("gemm")
        self._dtype = getattr(torch, query.dtype)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        bias = None if bias is None else bias.to(self._dtype)
        return weight.to(self._dtype).contiguous(), bias

    def __call__(
        self, x: torch.Tensor, packed: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, bias = packed
        y: torch.Tensor = self._call(x.contiguous(), weight, bias)
        return y if out is None else out.copy_(y)
