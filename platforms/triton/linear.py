"""Linear layers: own kernels for steps of one token, and of few where they were measured to be faster than the vendor's
library, which does all others.

Contract: headrace.platforms.linear. Weights stay as they came, [out, in], so that a tied table serves as both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.linear import LinearImpl, Norm
from headrace.platforms.queries import LinearQuery
from headrace.platforms.triton.launch import Launcher, Launchers, launch_options, power_of_two
from headrace.platforms.triton.linear_kernels import few_rows_kernel, gated_row_kernel, row_kernel

# Up to so many rows of weights a program has few rows of its own, so that there are programs for every unit.
SHORT = 4096
# Columns up to which a program holds whole rows.
WIDE = 4096
# Rows of x that the products of few rows are compiled for.
FEW_ROWS = (16, 32, 64, 128)


def row_options(query: LinearQuery, runtime: DeviceRuntime) -> dict[str, Any]:
    """Compile-time constants of the kernel for one row; what was fastest in benchmarks/cuda/kernels.py."""
    width = power_of_two(query.in_features)
    if width <= WIDE:
        rows, warps = (4 if width <= WIDE // 2 else 2), max(1, width // 512)
    else:
        rows, width, warps = (4, 512, 4) if query.out_features <= SHORT else (2, 1024, 2)
    return _chosen("row", query, runtime, rows, width, warps) | {"N": query.out_features}


def gated_row_options(query: LinearQuery, runtime: DeviceRuntime) -> dict[str, Any]:
    """The same for gate and up with the activation: a program has as many rows of both."""
    width = power_of_two(query.in_features)
    if width <= WIDE:
        rows, warps = (2 if width <= WIDE // 2 else 1), max(1, width // 512)
    else:
        rows, width, warps = (2, 512, 4) if query.out_features <= SHORT else (1, 1024, 2)
    return _chosen("gated_row", query, runtime, rows, width, warps) | {"N": query.out_features // 2}


def _chosen(
    kernel: str, query: LinearQuery, runtime: DeviceRuntime, rows: int, width: int, warps: int
) -> dict[str, Any]:
    if query.dtype == "float32":
        width = min(width, WIDE // 4)
    options = {"BLOCK_N": rows, "BLOCK_K": width, "num_warps": warps, "num_stages": 1}
    chosen = launch_options(kernel, query, runtime, options, dependent=True)
    whole, even = chosen["BLOCK_K"] >= query.in_features, not query.in_features % chosen["BLOCK_K"]
    return {**chosen, "BIAS": query.bias, "WHOLE": whole, "EVEN": even}


def few_options(query: LinearQuery, runtime: DeviceRuntime, rows: int) -> dict[str, Any]:
    """Of the product of up to `rows` rows. BLOCK_N is 0 where the library does it: that is where nothing else was
    measured, so it is for platforms (`DeviceRuntime.kernel_options`) to change."""
    options: dict[str, Any] = {"BLOCK_M": rows, "BLOCK_N": 0, "BLOCK_K": 64, "SPLITS": 1}
    precision = "ieee" if query.dtype == "float32" else "tf32"
    options |= {"PRECISION": precision, "num_warps": 4, "num_stages": 4}
    chosen = launch_options("few_rows", query, runtime, options, dependent=True)
    even = not query.in_features % chosen["BLOCK_K"]
    tiles = -(-query.in_features // chosen["BLOCK_K"])
    chosen["SPLITS"] = -(-tiles // -(-tiles // chosen["SPLITS"]))  # none is empty
    return {
        **chosen,
        "N": query.out_features,
        "BIAS": query.bias,
        "EVEN": even,
    }


class TritonLinear(LinearImpl):
    gated_rows = 1

    def __init__(self, query: LinearQuery, runtime: DeviceRuntime) -> None:
        super().__init__(query, runtime)
        self._dtype = getattr(torch, query.dtype)
        self._out_dtype = getattr(torch, query.out_dtype or query.dtype)
        options = row_options(query, runtime)
        self._row = Launchers(row_kernel, options)
        self._plain = self._row(NORM=False, KEEP=False)
        self._grid = (triton.cdiv(query.out_features, options["BLOCK_N"]), 1, 1)
        gated = gated_row_options(query, runtime)
        self._gated_row = Launchers(gated_row_kernel, gated)
        self._gated_grid = (triton.cdiv(query.out_features // 2, gated["BLOCK_N"]), 1, 1)
        # A norm needs the whole row, and every program computes it: more of them than there are units lose more time
        # than a kernel of its own takes.
        short = query.out_features // options["BLOCK_N"] <= runtime.info.units
        self.normed_rows = int(short and options["WHOLE"] and gated["WHOLE"])
        few = {rows: few_options(query, runtime, rows) for rows in FEW_ROWS}
        self._few = {rows: _Few(query, runtime, one) for rows, one in few.items() if one["BLOCK_N"]}
        self._most_rows = max(self._few, default=1)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        bias = None if bias is None else bias.to(self._dtype)
        return weight.to(self._dtype).contiguous(), bias

    def __call__(
        self, x: torch.Tensor, packed: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, bias = packed
        if x.shape[0] != 1:
            if 0 < x.shape[0] <= self._most_rows:
                few = self._few.get(max(FEW_ROWS[0], power_of_two(x.shape[0])))
                if few is not None:
                    return few(x, weight, bias, out)
            return self._library(x, weight, bias, out)
        if out is None:
            out = torch.empty(1, weight.shape[0], dtype=self._out_dtype, device=x.device)
        if x.stride(1) != 1:
            x = x.contiguous()
        tensors = (x, weight, weight if bias is None else bias, out, x, x, x, x)
        self._plain(self._grid, *tensors, weight.shape[1], weight.stride(0), 0.0)
        return out

    def gated(self, x: torch.Tensor, packed: Any, activation: str) -> torch.Tensor:
        weight, bias = packed
        half = weight.shape[0] // 2
        out = torch.empty(x.shape[0], half, dtype=self._out_dtype, device=x.device)
        if x.shape[0]:
            if x.stride(1) != 1:
                x = x.contiguous()
            tensors = (x, weight, weight if bias is None else bias, out, x, x, x)
            launch = self._gated_row(KIND=activation, NORM=False)
            launch(self._gated_grid, *tensors, weight.shape[1], weight.stride(0), 0.0)
        return out

    def normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm,
        packed: Any,
        activation: str = "",
        keep: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        weight, bias = packed
        features = weight.shape[0] // 2 if activation else weight.shape[0]
        y = torch.empty(x.shape[0], features, dtype=self._out_dtype, device=x.device)
        total = torch.empty_like(residual)
        normed = torch.empty_like(total) if keep else None
        if x.shape[0]:
            tensors = (x, weight, weight if bias is None else bias, y, residual, norm.weight, total)
            numbers = (weight.shape[1], weight.stride(0), norm.eps)
            if activation:
                launch = self._gated_row(KIND=activation, NORM=True)
                launch(self._gated_grid, *tensors, *numbers)
            else:
                launch = self._row(NORM=True, KEEP=keep)
                launch(self._grid, *tensors, total if normed is None else normed, *numbers)
        return y, total, normed

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


class _Few:
    """The product of few rows as it is launched with `options`."""

    def __init__(self, query: LinearQuery, runtime: DeviceRuntime, options: dict[str, Any]) -> None:
        self._launch = Launcher(few_rows_kernel, {**options, "KIND": ""})
        self._out_dtype = getattr(torch, query.out_dtype or query.dtype)
        self._grid = (triton.cdiv(query.out_features, options["BLOCK_N"]), options["SPLITS"], 1)
        self._parts = (options["SPLITS"], options["BLOCK_M"], query.out_features)
        # Programs that ended, for each block of columns; 0 between launches. One stream at a time runs this instance.
        self._done = torch.zeros(self._grid[0], dtype=torch.int32, device=runtime.device)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty(x.shape[0], weight.shape[0], dtype=self._out_dtype, device=x.device)
        if x.stride(1) != 1:
            x = x.contiguous()
        partial = out  # not used with one split
        if self._grid[1] > 1:
            partial = torch.empty(self._parts, dtype=torch.float32, device=x.device)
        tensors = (x, weight, weight if bias is None else bias, out, partial, self._done)
        strides = (x.stride(0), out.stride(0), weight.shape[1], weight.stride(0))
        self._launch(self._grid, *tensors, x.shape[0], *strides)
        return out
