"""The product of one row: bound by reading the weights once, so all that matters is how many reads are in flight.

Weights depend on nothing: a program asks for its first tile of them while the kernel before still runs; where a tile
is as wide as the matrix (WHOLE) that is all it will ever read. x has the layout of a tile where a tile has 256 columns
for each warp; else every step of the loop sends x through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.platforms.triton.activations import activate
from headrace.platforms.triton.launch import after_previous, let_next_start


@triton.jit
def columns(place, at, K, EVEN: tl.constexpr):
    """What lies at `place`; 0 in columns `at` from K on, of which there are none when tiles divide K (EVEN)."""
    if EVEN:
        return tl.load(place)
    else:
        return tl.load(place, mask=at < K, other=0.0)


@triton.jit
def entering(
    x, residual, scale, total, normed, at, K, eps,
    EVEN: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The row to multiply with, float32. With NORM the row is norm(x + residual), which every program computes for
    itself; the first one stores the sum to `total` and, with KEEP, the normed row to `normed`."""
    row = columns(x + at, at, K, EVEN)
    if NORM:
        dtype: tl.constexpr = x.dtype.element_ty
        added = row.to(tl.float32) + columns(residual + at, at, K, EVEN).to(tl.float32)
        row = added.to(dtype)
        value = row.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value, axis=0) / K + eps)
        result = (value * inverse * scale).to(dtype)
        if tl.program_id(0) == 0:
            tl.store(total + at, row, mask=at < K)
            if KEEP:
                tl.store(normed + at, result, mask=at < K)
        row = result
    return row.to(tl.float32)


@triton.jit
def row_kernel(
    x, w, bias, y, residual, norm, total, normed, K, stride_w, eps,
    N: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y [N] = w [N, K] x [K] (+ bias), on the ordinary units: no padding to a matrix tile. NORM: see `entering`."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    tile = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * stride_w + at[None, :]
    part = columns(tile, at[None, :], K, EVEN)
    scale = columns(norm + at, at, K, EVEN) if NORM else 0.0
    let_next_start(PDL)
    after_previous(PDL)
    if WHOLE:
        value = entering(x, residual, scale, total, normed, at, K, eps, EVEN, NORM, KEEP)
        result = tl.sum(part.to(tl.float32) * value[None, :], axis=1)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for k in range(BLOCK_K, K, BLOCK_K):
            following = columns(tile + k, k + at[None, :], K, EVEN)
            value = tl.load(x + k - BLOCK_K + at).to(tl.float32)
            acc += part.to(tl.float32) * value[None, :]
            part = following
        last = (K - 1) // BLOCK_K * BLOCK_K + at
        value = columns(x + last, last, K, EVEN).to(tl.float32)
        result = tl.sum(acc + part.to(tl.float32) * value[None, :], axis=1)
    if BIAS:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + n, result.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def gated_row_kernel(
    x, w, bias, y, residual, norm, total, K, stride_w, eps,
    N: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y [N] = act(w1 x) * (w3 x) for w = [w1, w3] of N rows each; read as row_kernel reads."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    gates = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * stride_w + at[None, :]
    ups = gates + N * stride_w.to(tl.int64)
    a = columns(gates, at[None, :], K, EVEN)
    b = columns(ups, at[None, :], K, EVEN)
    scale = columns(norm + at, at, K, EVEN) if NORM else 0.0
    let_next_start(PDL)
    after_previous(PDL)
    if WHOLE:
        value = entering(x, residual, scale, total, total, at, K, eps, EVEN, NORM, False)[None, :]
        gated = tl.sum(a.to(tl.float32) * value, axis=1)
        upper = tl.sum(b.to(tl.float32) * value, axis=1)
    else:
        gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for k in range(BLOCK_K, K, BLOCK_K):
            next_a = columns(gates + k, k + at[None, :], K, EVEN)
            next_b = columns(ups + k, k + at[None, :], K, EVEN)
            value = tl.load(x + k - BLOCK_K + at).to(tl.float32)[None, :]
            gate += a.to(tl.float32) * value
            up += b.to(tl.float32) * value
            a = next_a
            b = next_b
        last = (K - 1) // BLOCK_K * BLOCK_K + at
        value = columns(x + last, last, K, EVEN).to(tl.float32)[None, :]
        gated = tl.sum(gate + a.to(tl.float32) * value, axis=1)
        upper = tl.sum(up + b.to(tl.float32) * value, axis=1)
    if BIAS:
        gated += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        upper += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
    result = activate(gated, KIND) * upper
    tl.store(y + n, result.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def finish(acc, up, bias, y, m, n, M, stride_y, N: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Rows below M and columns below N of y: the sums with their bias, or act(acc) * up of both."""
    inside = n < N
    if BIAS:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if KIND != "":
        if BIAS:
            up += tl.load(bias + N + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        acc = activate(acc, KIND) * up
    place = y + m.to(tl.int64)[:, None] * stride_y + n[None, :]
    tl.store(place, acc.to(y.dtype.element_ty), mask=(m < M)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["M"])
def few_rows_kernel(
    x, w, bias, y, partial, done, M, stride_x, stride_y, K, stride_w,
    N: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [M, N] = x [M, K] w^T (+ bias) for M <= BLOCK_M rows, or, with a KIND of activation, gate and up as
    gated_row_kernel has them (one split).

    A program sums one of SPLITS parts of K. The one that ends last for its columns, by their count in `done`, adds the
    parts in partial [SPLITS, BLOCK_M, N] in order and leaves the count at 0. The first tile of weights is on its way
    before the kernel before has ended.
    """
    GATED: tl.constexpr = KIND != ""
    split = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    tiles = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(tiles, SPLITS)
    start = split * share * BLOCK_K
    stop = tl.minimum(start + share * BLOCK_K, K)
    weights = w + tl.minimum(n, N - 1).to(tl.int64)[None, :] * stride_w + k[:, None]
    ups = weights + N * stride_w.to(tl.int64)
    b = columns(weights + start, start + k[:, None], K, EVEN)
    c = columns(ups + start, start + k[:, None], K, EVEN) if GATED else b
    let_next_start(PDL)
    after_previous(PDL)
    live = (m < M)[:, None]
    rows = x + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    a = tl.load(rows + start, mask=live & (start + k < K)[None, :], other=0.0)
    acc = tl.dot(a, b, input_precision=PRECISION)
    up = tl.dot(a, c, input_precision=PRECISION) if GATED else acc
    for at in range(start + BLOCK_K, stop, BLOCK_K):
        mask = live if EVEN else live & (at + k < K)[None, :]
        a = tl.load(rows + at, mask=mask, other=0.0)
        b = columns(weights + at, at + k[:, None], K, EVEN)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if GATED:
            c = columns(ups + at, at + k[:, None], K, EVEN)
            up = tl.dot(a, c, up, input_precision=PRECISION)
    if SPLITS == 1:
        finish(acc, up, bias, y, m, n, M, stride_y, N, BIAS, KIND)
    else:
        parts = partial + m[:, None] * N + n[None, :]
        inside = (n < N)[None, :]
        tl.store(parts + split * BLOCK_M * N, acc, mask=inside)
        count = done + tl.program_id(0)
        tl.debug_barrier()  # what all threads of the program stored comes before the count
        if tl.atomic_add(count, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(count, 0)
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for part in range(SPLITS):
                place = parts + part * BLOCK_M * N
                total += tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
            finish(total, total, bias, y, m, n, M, stride_y, N, BIAS, KIND)
