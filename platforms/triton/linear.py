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
from headrace.platforms.triton.launch import power_of_two
from headrace.platforms.triton.linear_kernels import row_kernel

# What all programs together bring near ahead of time: well below the L2 cache, which also holds what is in use.
EARLY_BYTES = 32 << 20
LINE_BYTES = 128
PROGRAMS_A_UNIT = 4  # that fit at once
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def row_options(query: LinearQuery, units: int) -> dict[str, Any]:
    """Compile-time constants of the kernel for one row on a device of `units` multiprocessors."""
    block = 8 if query.out_features < 8192 else 16
    width = 512 if query.dtype != "float32" else 256
    early = min(PROGRAMS_A_UNIT * units, triton.cdiv(query.out_features, block))
    share = EARLY_BYTES // (early * block * LINE_BYTES)
    lines = triton.cdiv(query.in_features * ITEM_BYTES[query.dtype], LINE_BYTES)
    return {
        "N": query.out_features,
        "BIAS": query.bias,
        "BLOCK_N": block,
        "BLOCK_K": width,
        "STAGES": 4,
        "EVEN": query.in_features % width == 0,
        "EARLY": early,
        "LINES": power_of_two(max(1, min(share, lines))),
        "num_warps": 4,
    }


class TritonLinear(LinearImpl):
    def __init__(self, query: LinearQuery, runtime: DeviceRuntime) -> None:
        super().__init__(query, runtime)
        pdl = "pdl" in runtime.info.features
        launch: dict[str, Any] = {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
        self._dtype = getattr(torch, query.dtype)
        self._out_dtype = getattr(torch, query.out_dtype or query.dtype)
        self._row = {**row_options(query, runtime.info.units), **launch}
        self._grid = (triton.cdiv(query.out_features, self._row["BLOCK_N"]),)

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
        row_kernel[self._grid](
            x, weight, weight if bias is None else bias, out, weight.shape[1], weight.stride(0),
            **self._row,
        )  # fmt: skip
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
