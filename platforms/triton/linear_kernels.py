"""The product of one row: bound by reading the weights once, so all that matters is how many reads are in flight."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.platforms.triton.activations import activate
from headrace.platforms.triton.launch import after_previous, let_next_start


@triton.jit
def row_kernel(
    x, w, bias, y, K, stride_w, N: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [N] = w [N, K] x [K] (+ bias), on the ordinary units: no padding to a matrix tile.

    A tile of weights is always on its way while the one before it is used. Weights depend on nothing, so the first
    one is asked for while the kernel that computes x still runs.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    tile = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * stride_w + at[None, :]
    if EVEN:
        part = tl.load(tile)
    else:
        part = tl.load(tile, mask=(at < K)[None, :], other=0.0)
    let_next_start(PDL)
    after_previous(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in range(BLOCK_K, K, BLOCK_K):
        if EVEN:
            following = tl.load(tile + k)
            value = tl.load(x + k - BLOCK_K + at)
        else:
            following = tl.load(tile + k, mask=(k + at < K)[None, :], other=0.0)
            value = tl.load(x + k - BLOCK_K + at)
        acc += part.to(tl.float32) * value.to(tl.float32)[None, :]
        part = following
    last = (K - 1) // BLOCK_K * BLOCK_K + at
    value = tl.load(x + last, mask=last < K, other=0.0)
    acc += part.to(tl.float32) * value.to(tl.float32)[None, :]
    result = tl.sum(acc, axis=1)
    if BIAS:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + n, result.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def gated_row_kernel(
    x, w, bias, y, K, stride_w, N: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [N] = act(w1 x) * (w3 x) for w = [w1, w3] of N rows each; read as row_kernel reads."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    gates = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * stride_w + at[None, :]
    ups = gates + N * stride_w.to(tl.int64)
    if EVEN:
        a = tl.load(gates)
        b = tl.load(ups)
    else:
        a = tl.load(gates, mask=(at < K)[None, :], other=0.0)
        b = tl.load(ups, mask=(at < K)[None, :], other=0.0)
    let_next_start(PDL)
    after_previous(PDL)
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in range(BLOCK_K, K, BLOCK_K):
        if EVEN:
            next_a = tl.load(gates + k)
            next_b = tl.load(ups + k)
        else:
            next_a = tl.load(gates + k, mask=(k + at < K)[None, :], other=0.0)
            next_b = tl.load(ups + k, mask=(k + at < K)[None, :], other=0.0)
        value = tl.load(x + k - BLOCK_K + at).to(tl.float32)[None, :]
        gate += a.to(tl.float32) * value
        up += b.to(tl.float32) * value
        a = next_a
        b = next_b
    last = (K - 1) // BLOCK_K * BLOCK_K + at
    value = tl.load(x + last, mask=last < K, other=0.0).to(tl.float32)[None, :]
    gated = tl.sum(gate + a.to(tl.float32) * value, axis=1)
    upper = tl.sum(up + b.to(tl.float32) * value, axis=1)
    if BIAS:
        gated += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        upper += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
    result = activate(gated, KIND) * upper
    tl.store(y + n, result.to(y.dtype.element_ty), mask=n < N)
