"""Linear layers: own kernels for steps of few tokens, the vendor's library for the others.

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
from headrace.platforms.triton.linear_kernels import row_kernel, rows_kernel

# Up to so many rows the own kernel is used. benchmarks/cuda/linear.py measures where that ends.
MOST_ROWS = 16


def row_options(query: LinearQuery) -> dict[str, Any]:
    """Compile-time constants of the kernel for one row."""
    block = 8 if query.out_features < 8192 else 16
    width = 512 if query.dtype != "float32" else 256
    return {
        "N": query.out_features,
        "BIAS": query.bias,
        "BLOCK_N": block,
        "BLOCK_K": width,
        "STAGES": 4,
        "EVEN": query.in_features % width == 0,
        "num_warps": 4,
    }


def rows_options(query: LinearQuery) -> dict[str, Any]:
    """Compile-time constants of the kernel for a few rows."""
    return {
        "N": query.out_features,
        "BIAS": query.bias,
        "BLOCK_M": 16,
        "BLOCK_N": 32,
        "BLOCK_K": 256,
        "EVEN": query.in_features % 256 == 0,
        "num_warps": 4,
        "num_stages": 4,
    }


class TritonLinear(LinearImpl):
    def __init__(self, query: LinearQuery, runtime: DeviceRuntime) -> None:
        super().__init__(query, runtime)
        pdl = "pdl" in runtime.info.features
        launch: dict[str, Any] = {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
        self._dtype = getattr(torch, query.dtype)
        self._out_dtype = getattr(torch, query.out_dtype or query.dtype)
        self._row = {**row_options(query), **launch}
        self._rows = {**rows_options(query), **launch}
        self._row_grid = (triton.cdiv(query.out_features, self._row["BLOCK_N"]),)
        self._rows_grid = (triton.cdiv(query.out_features, self._rows["BLOCK_N"]),)
        # products of float32 matrices by matrix units would be rounded
        self._most_rows = 1 if query.dtype == "float32" else MOST_ROWS

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        bias = None if bias is None else bias.to(self._dtype)
        return weight.to(self._dtype).contiguous(), bias

    def __call__(
        self, x: torch.Tensor, packed: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, bias = packed
        rows = x.shape[0]
        if not 0 < rows <= self._most_rows:
            return self._library(x, weight, bias, out)
        if out is None:
            out = torch.empty(rows, weight.shape[0], dtype=self._out_dtype, device=x.device)
        if x.stride(1) != 1:
            x = x.contiguous()
        inputs = (x, weight, weight if bias is None else bias, out)
        width = weight.shape[1]
        if rows == 1:
            row_kernel[self._row_grid](*inputs, width, weight.stride(0), **self._row)
        else:
            strides = (x.stride(0), weight.stride(0), out.stride(0))
            rows_kernel[self._rows_grid](*inputs, rows, width, *strides, **self._rows)
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
