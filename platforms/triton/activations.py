"""Gated activations. Contracts: headrace.platforms.ops."""

from __future__ import annotations

from typing import ClassVar

import torch
import triton
import triton.language as tl

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import ActivationQuery
from headrace.platforms.triton.launch import (
    Launchers,
    after_previous,
    launch_options,
    let_next_start,
)

BLOCK = 1024


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def activate(gate, KIND: tl.constexpr):
    """silu | gelu | gelu_tanh of float32 values."""
    if KIND == "silu":
        active = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        active = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = 0.5 * gate * (1 + tanh(inner))
    return active


@triton.jit
def gated_kernel(
    x, out, stride, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [T, WIDTH] = act(x[:, :WIDTH]) * x[:, WIDTH:]."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    let_next_start(PDL)
    after_previous(PDL)
    row = x + token * stride
    gate = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    active = activate(gate, KIND)
    tl.store(out + token * WIDTH + at, (active * up).to(out.dtype.element_ty), mask=inside)


class _Gated:
    kind: ClassVar[str]

    def __init__(self, query: ActivationQuery, runtime: DeviceRuntime) -> None:
        options = {"KIND": self.kind, "BLOCK": BLOCK, "num_warps": 4}
        self.options = launch_options("gated", query, runtime, options, dependent=True)
        self._launch = Launchers(gated_kernel, self.options)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        tokens, width = x.shape[0], x.shape[1] // 2
        out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
        if tokens:
            grid = (tokens, triton.cdiv(width, self.options["BLOCK"]), 1)
            self._launch(WIDTH=width)(grid, x, out, x.stride(0))
        return out


class SiluAndMul(_Gated):
    kind = "silu"


class GeluAndMul(_Gated):
    kind = "gelu"


class GeluTanhAndMul(_Gated):
    kind = "gelu_tanh"
