"""The two products of experts_kernels.py where a device copies whole tiles by itself ("tma"): weights, and what lies
between the products, come by descriptors, so that no thread computes addresses for them.

A program takes the tiles num_programs apart. With FLAT the loops over tiles and over a tile's depth are one, and the
first weights of a tile are on their way while the one before it is stored; else a program is launched for each tile.
SWAP: weights are the first operand. Then the dimension of which matrix units want 64 is features, and 16 tokens do not
leave three quarters of them idle. Without it gate and up are one operand of twice the columns.
AHEAD: bytes of each row of a program's first tile of weights to ask for before the kernel in front has ended, as if
each expert had one tile. Programs that fill a unit's memory leave it to those of the next kernel one by one, so the
first weights of down are on their way while the last programs of gate and up still run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.platforms.triton.activations import activate
from headrace.platforms.triton.launch import after_previous, let_next_start


@triton.jit
def _ask_for(place, BYTES: tl.constexpr):
    """Brings BYTES from each address into the device's cache; nothing waits for them."""
    size = tl.full(place.shape, BYTES, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [place, size],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def tiled_gate_up_kernel(
    x, w, h, order, tiles, w13, stride_x, H, INTER, TOP_K: tl.constexpr, KIND: tl.constexpr,
    SWAP: tl.constexpr, FLAT: tl.constexpr, AHEAD: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """h = act(x w1^T) * (x w3^T) in the order of `order`. w: the memory that w13 describes, in tiles of
    [1, 2, BLOCK_N, BLOCK_K] of [E, 2, INTER, H]; with SWAP in tiles of [1, BLOCK_N, BLOCK_K] of [E, 2 * INTER, H].
    """
    let_next_start(PDL)
    row = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    f = tl.arange(0, BLOCK_N)
    blocks = tl.cdiv(INTER, BLOCK_N)
    if AHEAD:
        guess = tl.minimum(tl.program_id(0) // blocks, E - 1) * 2 * INTER
        guess += tl.minimum(tl.program_id(0) % blocks * BLOCK_N + f, INTER - 1)
        _ask_for(w + guess.to(tl.int64) * H, AHEAD)
        _ask_for(w + (guess + INTER).to(tl.int64) * H, AHEAD)
    after_previous(PDL)
    total = tl.load(tiles) * blocks
    for at in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLAT):
        tile = tiles + 3 + at // blocks * 3
        column = at % blocks * BLOCK_N
        expert = tl.load(tile)
        first = tl.load(tile + 1)
        live = first + row < tl.load(tile + 2)
        pair = tl.load(order + first + row, mask=live, other=0)
        rows = x + (pair // TOP_K).to(tl.int64)[:, None] * stride_x + k[None, :]
        if SWAP:
            gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        else:
            both = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for start in range(0, H, BLOCK_K):
            if EVEN:
                a = tl.load(rows + start, mask=live[:, None], other=0.0)
            else:
                a = tl.load(rows + start, mask=live[:, None] & (start + k < H)[None, :], other=0.0)
            if SWAP:
                b = w13.load([expert, column, start]).reshape(BLOCK_N, BLOCK_K)
                c = w13.load([expert, INTER + column, start]).reshape(BLOCK_N, BLOCK_K)
                gate = tl.dot(b, a.T, gate, input_precision=PRECISION)
                up = tl.dot(c, a.T, up, input_precision=PRECISION)
            else:
                b = w13.load([expert, 0, column, start]).reshape(2 * BLOCK_N, BLOCK_K)
                both = tl.dot(a, b.T, both, input_precision=PRECISION)
        if SWAP:
            value = tl.trans(activate(gate, KIND) * up)
        else:
            gate, up = tl.split(both.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1))
            value = activate(gate, KIND) * up
        place = h + (first + row).to(tl.int64)[:, None] * INTER + (column + f)[None, :]
        real = live[:, None] & (column + f < INTER)[None, :]
        tl.store(place, value.to(h.dtype.element_ty), mask=real)


@triton.jit
def tiled_down_kernel(
    w, y, order, tiles, h, w2, H, INTER, SWAP: tl.constexpr, FLAT: tl.constexpr,
    AHEAD: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = h w2^T, a row for each pair. h in tiles of [BLOCK_M, BLOCK_K] of [P, INTER], w2 in tiles of
    [1, BLOCK_N, BLOCK_K] of [E, H, INTER], which is w."""
    let_next_start(PDL)
    row = tl.arange(0, BLOCK_M)
    f = tl.arange(0, BLOCK_N)
    blocks = tl.cdiv(H, BLOCK_N)
    if AHEAD:
        guess = tl.minimum(tl.program_id(0) // blocks, E - 1) * H
        guess += tl.minimum(tl.program_id(0) % blocks * BLOCK_N + f, H - 1)
        _ask_for(w + guess.to(tl.int64) * INTER, AHEAD)
    after_previous(PDL)
    total = tl.load(tiles) * blocks
    for at in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLAT):
        tile = tiles + 3 + at // blocks * 3
        column = at % blocks * BLOCK_N
        expert = tl.load(tile)
        first = tl.load(tile + 1)
        end = tl.load(tile + 2)
        if SWAP:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, INTER, BLOCK_K):
            # rows behind the tile's last are another expert's, or zeros behind all
            a = h.load([first, start])
            b = w2.load([expert, column, start]).reshape(BLOCK_N, BLOCK_K)
            if SWAP:
                acc = tl.dot(b, a.T, acc, input_precision=PRECISION)
            else:
                acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
        live = first + row < end
        pair = tl.load(order + first + row, mask=live, other=0)
        value = tl.trans(acc) if SWAP else acc
        place = y + pair.to(tl.int64)[:, None] * H + (column + f)[None, :]
        real = live[:, None] & (column + f < H)[None, :]
        tl.store(place, value.to(y.dtype.element_ty), mask=real)
