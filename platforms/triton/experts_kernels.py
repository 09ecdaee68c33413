"""Kernels of a mixture of experts. T tokens, K experts for each: P = T * K pairs; pair p belongs to token p // K.

One or two tokens: two products on the ordinary units for each pair. Up to 16 tokens: each expert's first pair computes
for all pairs of that expert. More: pairs are sorted by expert, in tiles of BLOCK_M that no two experts share. In the
last two cases an expert's weights are read once for a tile. Nothing is read back by the host: grids cover the most
tiles that there can be.
What changes from step to step is never a compile-time constant: a step must not wait for a compiler.

h [P, INTER] and y [P, H] have a row for each pair; where pairs are sorted, those of h are in that order. w13 is
[E, 2 * INTER, H] (gate's rows, then up's), w2 [E, H, INTER]. Sums are float32. The order of pairs within an expert is
not fixed, and no result depends on it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.platforms.triton.activations import activate
from headrace.platforms.triton.launch import after_previous, let_next_start
from headrace.platforms.triton.linear_kernels import columns

AT_ONCE = tl.constexpr(8)  # chunks whose counts are read together


@triton.jit
def _counted(ids, start, P, E: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Pairs of each expert among start .. start + CHUNK; what is beyond P is counted as expert E."""
    counts = tl.zeros([BINS], tl.int32)
    for offset in range(0, tl.minimum(CHUNK, P - start), BLOCK):
        at = start + offset + tl.arange(0, BLOCK)
        counts += tl.histogram(tl.load(ids + at, mask=at < P, other=E), BINS)
    return counts


@triton.jit(do_not_specialize=["P"])
def count_kernel(
    ids, counts, P, E: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """counts [chunks, BINS]: pairs of each expert in each chunk."""
    chunk = tl.program_id(0)
    let_next_start(PDL)
    after_previous(PDL)
    found = _counted(ids, chunk * CHUNK, P, E, BINS, CHUNK, BLOCK)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["P", "block_m"])
def sort_kernel(
    ids, counts, order, tiles, P, block_m, ONE: tl.constexpr, E: tl.constexpr,
    BINS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """order [P]: pairs by expert. tiles [1 + most_tiles, 3]: expert, first place in `order`, and where its rows stop,
    at most block_m further; the first row says how many tiles there are, what is behind them is not written.

    A program places the pairs of a chunk: behind those of lower experts, and of its expert in earlier chunks. With
    ONE chunk it counts them itself; else its row of `counts` gives way to where the next pair of each expert goes,
    so counts [2, chunks, BINS] has a second half for that.
    """
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    expert = tl.arange(0, BINS)
    let_next_start(PDL)
    after_previous(PDL)
    before = tl.zeros([BINS], tl.int32)
    if ONE:
        total = _counted(ids, 0, P, E, BINS, CHUNK, BLOCK)
    else:
        total = tl.zeros([BINS], tl.int32)
        for base in range(0, chunks, AT_ONCE):
            other = base + tl.arange(0, AT_ONCE)[:, None]
            count = tl.load(counts + other * BINS + expert[None, :], mask=other < chunks, other=0)
            total += tl.sum(count, axis=0)
            before += tl.sum(tl.where(other < chunk, count, 0), axis=0)
    total = tl.where(expert < E, total, 0)
    end = tl.cumsum(total, axis=0)
    start = end - total
    nexts = counts + (chunks + chunk) * BINS
    tl.store(nexts + expert, start + before)
    tl.debug_barrier()
    for offset in range(0, tl.minimum(CHUNK, P - chunk * CHUNK), BLOCK):
        pair = chunk * CHUNK + offset + tl.arange(0, BLOCK)
        mine = tl.load(ids + pair, mask=pair < P, other=0)
        place = tl.atomic_add(nexts + mine, 1, mask=pair < P)
        tl.store(order + place, pair, mask=pair < P)
    number = (total + block_m - 1) // block_m
    tile_end = tl.cumsum(number, axis=0)
    tile_start = tile_end - number
    if chunk == 0:
        tl.store(tiles, tl.sum(number, axis=0))
    # one tile of every expert that has so many
    for nth in range(chunk, tl.max(number, axis=0), chunks):
        place = tiles + 3 + 3 * (tile_start + nth)
        first = start + nth * block_m
        tl.store(place, expert, mask=nth < number)
        tl.store(place + 1, first, mask=nth < number)
        tl.store(place + 2, tl.minimum(first + block_m, end), mask=nth < number)


@triton.jit
def _tile(ids, order, tiles, P, FEW: tl.constexpr, PAIRS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, its pairs [BLOCK_M], their rows of h, how many they are) of the program's tile; none when it has nothing
    to do."""
    tile = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    if FEW:
        other = tl.arange(0, PAIRS)
        expert = tl.load(ids + tile)
        same = tl.load(ids + other, mask=other < P, other=-1) == expert
        earlier = tl.sum((same & (other < tile)).to(tl.int32), axis=0)
        rank = tl.cumsum(same.to(tl.int32), axis=0) - 1
        hit = same[None, :] & (rank[None, :] == row[:, None])
        pair = tl.sum(tl.where(hit, other[None, :], 0), axis=1)
        count = tl.where(earlier == 0, tl.sum(same.to(tl.int32), axis=0), 0)
        place = pair
    else:
        expert = tl.load(tiles + 3 + 3 * tile)
        first = tl.load(tiles + 4 + 3 * tile)
        end = tl.load(tiles + 5 + 3 * tile)
        count = tl.where(tile < tl.load(tiles), end - first, 0)
        pair = tl.load(order + first + row, mask=row < count, other=0)
        place = first + row
    return expert, pair, place, count


@triton.jit(do_not_specialize=["P"])
def gate_up_kernel(
    x, w13, h, ids, order, tiles, P, stride_x, H, INTER, TOP_K: tl.constexpr, KIND: tl.constexpr,
    FEW: tl.constexpr, PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h = act(x w1^T) * (x w3^T): BLOCK_N features of gate and the same of up for one tile."""
    let_next_start(PDL)
    after_previous(PDL)
    expert, pair, held, count = _tile(ids, order, tiles, P, FEW, PAIRS, BLOCK_M)
    if count > 0:
        live = tl.arange(0, BLOCK_M) < count
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        rows = x + (pair // TOP_K).to(tl.int64)[:, None] * stride_x + k[None, :]
        feature = tl.minimum(n, INTER - 1).to(tl.int64)
        gates = w13 + expert.to(tl.int64) * (2 * INTER) * H + feature[None, :] * H + k[:, None]
        ups = gates + INTER.to(tl.int64) * H
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, H, BLOCK_K):
            if EVEN:
                a = tl.load(rows + start, mask=live[:, None], other=0.0)
                b = tl.load(gates + start)
                c = tl.load(ups + start)
            else:
                inside = start + k < H
                a = tl.load(rows + start, mask=live[:, None] & inside[None, :], other=0.0)
                b = tl.load(gates + start, mask=inside[:, None], other=0.0)
                c = tl.load(ups + start, mask=inside[:, None], other=0.0)
            gate = tl.dot(a, b, gate, input_precision=PRECISION)
            up = tl.dot(a, c, up, input_precision=PRECISION)
        place = h + held.to(tl.int64)[:, None] * INTER + n[None, :]
        value = activate(gate, KIND) * up
        tl.store(place, value.to(h.dtype.element_ty), mask=live[:, None] & (n < INTER)[None, :])


@triton.jit(do_not_specialize=["P"])
def down_kernel(
    h, w2, y, ids, order, tiles, P, H, INTER, FEW: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = h w2^T: BLOCK_N features for one tile."""
    let_next_start(PDL)
    after_previous(PDL)
    expert, pair, held, count = _tile(ids, order, tiles, P, FEW, PAIRS, BLOCK_M)
    if count > 0:
        live = tl.arange(0, BLOCK_M) < count
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        rows = h + held.to(tl.int64)[:, None] * INTER + k[None, :]
        feature = tl.minimum(n, H - 1).to(tl.int64)
        weights = w2 + expert.to(tl.int64) * H * INTER + feature[None, :] * INTER + k[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, INTER, BLOCK_K):
            if EVEN:
                a = tl.load(rows + start, mask=live[:, None], other=0.0)
                b = tl.load(weights + start)
            else:
                inside = start + k < INTER
                a = tl.load(rows + start, mask=live[:, None] & inside[None, :], other=0.0)
                b = tl.load(weights + start, mask=inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        place = y + pair.to(tl.int64)[:, None] * H + n[None, :]
        tl.store(place, acc.to(y.dtype.element_ty), mask=live[:, None] & (n < H)[None, :])


@triton.jit
def sum_kernel(
    y, weights, out, H, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, H]: the K rows of a token in y, weighted. A thread sums its own columns, with all rows on their way."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    let_next_start(PDL)
    after_previous(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        row = tl.load(y + pair * H + at, mask=at < H, other=0.0)
        total += row.to(tl.float32) * tl.load(weights + pair)
    tl.store(out + token * H + at, total.to(out.dtype.element_ty), mask=at < H)


@triton.jit
def gate_up_row_kernel(
    x, w13, h, ids, stride_x, H, INTER, TOP_K: tl.constexpr, KIND: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """h [P, INTER] of few tokens: BLOCK_N features of gate and the same of up for one pair.

    The next kernel may start once the router's results are there, as it reads them before it waits for this one.
    """
    pair = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    feature = tl.minimum(n, INTER - 1).to(tl.int64)
    row = x + (pair // TOP_K).to(tl.int64) * stride_x + at
    after_previous(PDL)
    let_next_start(PDL)
    expert = tl.load(ids + pair).to(tl.int64)
    gates = w13 + expert * (2 * INTER) * H + feature[:, None] * H + at[None, :]
    ups = gates + INTER.to(tl.int64) * H
    if WHOLE:
        a = columns(gates, at[None, :], H, EVEN)
        b = columns(ups, at[None, :], H, EVEN)
        value = columns(row, at, H, EVEN).to(tl.float32)[None, :]
        gated = tl.sum(a.to(tl.float32) * value, axis=1)
        upper = tl.sum(b.to(tl.float32) * value, axis=1)
    else:
        gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for k in range(0, H, BLOCK_K):
            a = columns(gates + k, k + at[None, :], H, EVEN)
            b = columns(ups + k, k + at[None, :], H, EVEN)
            value = columns(row + k, k + at, H, EVEN).to(tl.float32)[None, :]
            gate += a.to(tl.float32) * value
            up += b.to(tl.float32) * value
        gated = tl.sum(gate, axis=1)
        upper = tl.sum(up, axis=1)
    result = activate(gated, KIND) * upper
    tl.store(h + pair * INTER + n, result.to(h.dtype.element_ty), mask=n < INTER)


@triton.jit
def _of_experts(place, at, live, INTER, EVEN: tl.constexpr, FULL: tl.constexpr):
    """Numbers of several experts at `place`; 0 for those that are none, and from column INTER on."""
    if EVEN and FULL:
        return tl.load(place)
    elif EVEN:
        return tl.load(place, mask=live, other=0.0)
    else:
        return tl.load(place, mask=live & (at < INTER), other=0.0)


@triton.jit
def down_row_kernel(
    h, w2, weights, ids, out, H, INTER, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [T, H] of few tokens: BLOCK_N features of one, over all its experts at once, so that many reads are in
    flight. Whom it reads is known when gate_up_row_kernel lets it start: a first tile is on its way before it waits.
    """
    FULL: tl.constexpr = TOP_K == K_PAD
    token = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    choice = tl.arange(0, K_PAD)
    real = choice < TOP_K
    # past the unit's own cache: these were written while the unit ran other programs
    mine = token * TOP_K + choice
    expert = tl.load(ids + mine, mask=real, other=0, cache_modifier=".cg").to(tl.int64)
    share = tl.load(weights + mine, mask=real, other=0.0, cache_modifier=".cg")
    feature = tl.minimum(n, H - 1).to(tl.int64)
    rows = h + mine[:, None] * INTER + at[None, :]
    tile = w2 + (expert[None, :] * H + feature[:, None])[:, :, None] * INTER + at[None, None, :]
    column, live = at[None, None, :], real[None, :, None]
    part = _of_experts(tile, column, live, INTER, EVEN, FULL)
    let_next_start(PDL)
    after_previous(PDL)
    if WHOLE:
        value = _of_experts(rows, at[None, :], real[:, None], INTER, EVEN, FULL)
        scaled = (value.to(tl.float32) * share[:, None])[None, :, :]
        result = tl.sum(tl.sum(part.to(tl.float32) * scaled, axis=2), axis=1)
    else:
        acc = tl.zeros([BLOCK_N, K_PAD, BLOCK_K], tl.float32)
        for i in range(0, INTER, BLOCK_K):
            # beyond the last column nothing is read
            following = tl.load(
                tile + i + BLOCK_K, mask=live & (i + BLOCK_K + column < INTER), other=0.0
            )
            value = _of_experts(rows + i, i + at[None, :], real[:, None], INTER, EVEN, FULL)
            acc += part.to(tl.float32) * (value.to(tl.float32) * share[:, None])[None, :, :]
            part = following
        result = tl.sum(tl.sum(acc, axis=2), axis=1)
    place = out + token.to(tl.int64) * H + n
    tl.store(place, result.to(out.dtype.element_ty), mask=n < H)
