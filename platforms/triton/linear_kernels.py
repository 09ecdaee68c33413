"""Products with few rows: bound by reading the weights once, so all that matters is how many reads are in flight."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.platforms.triton.launch import after_previous, let_next_start


@triton.jit
def row_kernel(
    x, w, bias, y, K, stride_w, N: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [N] = w [N, K] x [K] (+ bias): one row on the ordinary units, no padding to a matrix tile."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * stride_w
    at = tl.arange(0, BLOCK_K)
    let_next_start(PDL)
    after_previous(PDL)
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


@triton.jit
def rows_kernel(
    x, w, bias, y, rows, K, stride_x, stride_w, stride_y, N: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y [rows, N] = x [rows, K] w [N, K]^T (+ bias), all rows in one tile of BLOCK_M."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    column = w + tl.minimum(n, N - 1).to(tl.int64)[None, :] * stride_w
    row = x + m[:, None] * stride_x
    live = m < rows
    at = tl.arange(0, BLOCK_K)
    let_next_start(PDL)
    after_previous(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN:
            part = tl.load(column + (k + at)[:, None])
            value = tl.load(row + (k + at)[None, :], mask=live[:, None], other=0.0)
        else:
            inside = k + at < K
            part = tl.load(column + (k + at)[:, None], mask=inside[:, None], other=0.0)
            mask = live[:, None] & inside[None, :]
            value = tl.load(row + (k + at)[None, :], mask=mask, other=0.0)
        acc = tl.dot(value, part, acc)
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    place = y + m[:, None] * stride_y + n[None, :]
    tl.store(place, acc.to(y.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])
