"""Linear layers: an own kernel for steps of one token, the vendor's library for all others.

Contract: headrace.platforms.linear. Weights stay as they came, [out, in], so that a tied table serves as both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.linear import LinearImpl
from headrace.platforms.queries import LinearQuery
from headrace.platforms.triton.launch import Launcher, Launchers, launch_options
from headrace.platforms.triton.linear_kernels import gated_row_kernel, row_kernel

# Up to so many rows of weights a program has few rows of its own, so that there are programs for every unit.
SHORT = 4096


def row_options(query: LinearQuery, runtime: DeviceRuntime) -> dict[str, Any]:
    """Compile-time constants of the kernel for one row; what was fastest in benchmarks/cuda/kernels.py."""
    rows, width, warps = (4, 512, 4) if query.out_features <= SHORT else (2, 1024, 2)
    if query.dtype == "float32":
        width //= 2
    options = {"BLOCK_N": rows, "BLOCK_K": width, "num_warps": warps, "num_stages": 1}
    chosen = launch_options("row", query, runtime, options, dependent=True)
    even = query.in_features % chosen["BLOCK_K"] == 0
    return {**chosen, "N": query.out_features, "BIAS": query.bias, "EVEN": even}


def gated_row_options(query: LinearQuery, runtime: DeviceRuntime) -> dict[str, Any]:
    """The same for gate and up with the activation: a program has as many rows of both."""
    rows, width, warps = (2, 512, 4) if query.out_features <= SHORT else (1, 1024, 2)
    if query.dtype == "float32":
        width //= 2
    options = {"BLOCK_N": rows, "BLOCK_K": width, "num_warps": warps, "num_stages": 1}
    chosen = launch_options("gated_row", query, runtime, options, dependent=True)
    even = query.in_features % chosen["BLOCK_K"] == 0
    return {**chosen, "N": query.out_features // 2, "BIAS": query.bias, "EVEN": even}


class TritonLinear(LinearImpl):
    gated_rows = 1

    def __init__(self, query: LinearQuery, runtime: DeviceRuntime) -> None:
        super().__init__(query, runtime)
        self._dtype = getattr(torch, query.dtype)
        self._out_dtype = getattr(torch, query.out_dtype or query.dtype)
        options = row_options(query, runtime)
        self._row = Launcher(row_kernel, options)
        self._grid = (triton.cdiv(query.out_features, options["BLOCK_N"]), 1, 1)
        options = gated_row_options(query, runtime)
        self._gated_row = Launchers(gated_row_kernel, options)
        self._gated_grid = (triton.cdiv(query.out_features // 2, options["BLOCK_N"]), 1, 1)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        bias = None if bias is None else bias.to(self._dtype)
        return weight.to(self._dtype).contiguous(), bias

    def __call__(
        self, x: torch.Tensor, packed: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, bias = packed
        if x.shape[0] != 1:
            return self._library(x, weight, bias, out)
        if out is None:
            out = torch.empty(1, weight.shape[0], dtype=self._out_dtype, device=x.device)
        if x.stride(1) != 1:
            x = x.contiguous()
        tensors = (x, weight, weight if bias is None else bias, out)
        self._row(self._grid, *tensors, weight.shape[1], weight.stride(0))
        return out

    def gated(self, x: torch.Tensor, packed: Any, activation: str) -> torch.Tensor:
        weight, bias = packed
        half = weight.shape[0] // 2
        out = torch.empty(x.shape[0], half, dtype=self._out_dtype, device=x.device)
        if x.shape[0]:
            if x.stride(1) != 1:
                x = x.contiguous()
            tensors = (x, weight, weight if bias is None else bias, out)
            launch = self._gated_row(KIND=activation)
            launch(self._gated_grid, *tensors, weight.shape[1], weight.stride(0))
        return out

    def _library(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        if self._out_dtype == self._dtype:
            y = F.linear(x, weight, bias)
        elif x.is_cuda and self._out_dtype == torch.float32:
            # the sums as they are, not rounded to the inputs' dtype first
            y = torch.mm(x, weight.t(), out_dtype=torch.float32)
            if bias is not None:
                y += bias
        else:
            y = F.linear(x, weight, bias).to(self._out_dtype)
        return y if out is None else out.copy_(y)
