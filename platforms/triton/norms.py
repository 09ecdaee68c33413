"""RMS norm, alone and behind the residual addition. Contracts: headrace.platforms.ops."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import NormQuery
from headrace.platforms.triton.launch import (
    Launcher,
    after_previous,
    launch_options,
    let_next_start,
    power_of_two,
    warps_for,
)


@triton.jit
def rms_norm_kernel(
    x, weight, out, heads, stride_token, stride_head, eps, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row r of out [rows, WIDTH] is the norm of head r % heads of token r // heads."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    let_next_start(PDL)
    after_previous(PDL)
    start = x + (row // heads) * stride_token + (row % heads) * stride_head
    value = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    result = value * inverse * scale
    tl.store(out + row * WIDTH + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, out, stride_x, stride_residual, eps, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual += x, then out = norm(residual): the rounded sum is what is normed."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    let_next_start(PDL)
    after_previous(PDL)
    value = tl.load(x + row * stride_x + at, mask=inside, other=0.0).to(tl.float32)
    place = residual + row * stride_residual + at
    value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    total = value.to(residual.dtype.element_ty)
    tl.store(place, total, mask=inside)
    value = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    result = value * inverse * scale
    tl.store(out + row * WIDTH + at, result.to(out.dtype.element_ty), mask=inside)


def options(query: NormQuery, runtime: DeviceRuntime) -> dict[str, Any]:
    """How a norm is launched, either of them."""
    width = query.hidden
    chosen = {"WIDTH": width, "BLOCK": power_of_two(width), "num_warps": warps_for(width)}
    return launch_options("rms_norm", query, runtime, chosen, dependent=True)


class RmsNorm:
    def __init__(self, query: NormQuery, runtime: DeviceRuntime) -> None:
        self._launch = Launcher(rms_norm_kernel, options(query, runtime))

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        heads = 1
        if x.dim() > 2:
            heads = x.shape[-2]
            if x.dim() > 3:
                x = x.flatten(0, -3)
        rows = x.shape[0] * heads
        if rows:
            token, head = x.stride(0), x.stride(1) if heads > 1 else 0
            self._launch((rows, 1, 1), x, weight, out, heads, token, head, eps)
        return out


class AddRmsNorm:
    def __init__(self, query: NormQuery, runtime: DeviceRuntime) -> None:
        self._launch = Launcher(add_rms_norm_kernel, options(query, runtime))

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.shape[0]:
            strides = x.stride(0), residual.stride(0)
            self._launch((x.shape[0], 1, 1), x, residual, weight, out, *strides, eps)
        return out, residual
