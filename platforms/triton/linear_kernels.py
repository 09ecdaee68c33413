"""The product of one row: bound by reading the weights once, so all that matters is how many reads are in flight."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.platforms.triton.launch import after_previous, let_next_start

LINE = tl.constexpr(128)  # bytes of a cache line


@triton.jit
def prefetch(pointers):
    """Ask for these lines to be brought into the L2 cache; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def row_kernel(
    x, w, bias, y, K, stride_w, N: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
    LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [N] = w [N, K] x [K] (+ bias), on the ordinary units: no padding to a matrix tile.

    Weights depend on nothing, so the EARLY first programs bring the first LINES cache lines of their rows near while
    the kernel that computes x still runs.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * stride_w
    if PDL:
        if tl.program_id(0) < EARLY:
            step: tl.constexpr = LINE // (w.dtype.element_ty.primitive_bitwidth // 8)
            ahead = tl.minimum(tl.arange(0, LINES) * step, K - 1)
            prefetch(row + ahead[None, :])
    let_next_start(PDL)
    after_previous(PDL)
    at = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN:
            part = tl.load(row + (k + at)[None, :])
            value = tl.load(x + k + at)
        else:
            inside = k + at < K
            part = tl.load(row + (k + at)[None, :], mask=inside[None, :], other=0.0)
            value = tl.load(x + k + at, mask=inside, other=0.0)
        acc += part.to(tl.float32) * value.to(tl.float32)[None, :]
    result = tl.sum(acc, axis=1)
    if BIAS:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + n, result.to(y.dtype.element_ty), mask=n < N)
