"""Rotary embedding in place on strided heads. Contract: headrace.platforms.ops."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import RotaryQuery
from headrace.platforms.triton.launch import (
    Launchers,
    after_previous,
    launch_options,
    let_next_start,
    power_of_two,
)


@triton.jit
def turn(
    rows, live, cos, sin, HALF: tl.constexpr, NEOX: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The heads at rows [HEADS, 1], by the angles of their token."""
    at = tl.arange(0, WIDTH)
    if NEOX:
        first, second = at[None, :], at[None, :] + HALF
    else:
        first, second = 2 * at[None, :], 2 * at[None, :] + 1
    live &= (at < HALF)[None, :]
    a = tl.load(rows + first, mask=live, other=0.0).to(tl.float32)
    b = tl.load(rows + second, mask=live, other=0.0).to(tl.float32)
    tl.store(rows + first, (a * cos - b * sin).to(rows.dtype.element_ty), mask=live)
    tl.store(rows + second, (b * cos + a * sin).to(rows.dtype.element_ty), mask=live)


@triton.jit
def rotary_kernel(
    positions, q, k, cos_sin, q_token, q_head, k_token, k_head,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, NEOX: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program turns HEADS heads of one token, of q or of k: a choice between the two for each head would be one
    between pointers into different memory, which the compiler for AMD's devices does not take."""
    token = tl.program_id(0).to(tl.int64)
    let_next_start(PDL)
    after_previous(PDL)
    at = tl.arange(0, WIDTH)
    inside = at < HALF
    angles = cos_sin + tl.load(positions + token) * (2 * HALF)
    cos = tl.load(angles + at, mask=inside, other=0.0)[None, :]
    sin = tl.load(angles + HALF + at, mask=inside, other=0.0)[None, :]
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    head = tl.arange(0, HEADS)[:, None]
    if part < Q_PARTS:
        head += part * HEADS
        turn(q + token * q_token + head * q_head, head < Q_HEADS, cos, sin, HALF, NEOX, WIDTH)
    else:
        head += (part - Q_PARTS) * HEADS
        turn(k + token * k_token + head * k_head, head < K_HEADS, cos, sin, HALF, NEOX, WIDTH)


class Rotary:
    def __init__(self, query: RotaryQuery, runtime: DeviceRuntime) -> None:
        half = query.rotary_dim // 2
        options = {"HALF": half, "WIDTH": power_of_two(half), "num_warps": 4}
        self.options = launch_options("rotary", query, runtime, options, dependent=True)
        self._launch = Launchers(rotary_kernel, self.options)
        # about a thousand pairs for each program
        self._heads = max(1, 1024 // self.options["WIDTH"])

    def __call__(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        is_neox: bool,
    ) -> None:
        heads = q.shape[1], k.shape[1]
        block = min(self._heads, power_of_two(max(heads)))
        if not q.shape[0]:
            return
        launch = self._launch(Q_HEADS=heads[0], K_HEADS=heads[1], NEOX=is_neox, HEADS=block)
        strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
        grid = (q.shape[0], sum(triton.cdiv(n, block) for n in heads), 1)
        launch(grid, positions, q, k, cos_sin, *strides)
