"""Kernels of paged attention over caches [P, Hkv, S, D] of any strides with unit stride along D.

GROUP query heads share a KV head: a program handles all of them, so that every key and value is read once for the
whole group. Scores are kept in units of log2(e), where exp2 is the exponential. Sums are float32.
What changes from step to step is never a compile-time constant: a step must not wait for a compiler.
Whatever lies in a cache behind a sequence's end is masked when it is loaded: NaN in it reaches nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.platforms.triton.activations import tanh
from headrace.platforms.triton.launch import after_previous, let_next_start

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def as_stored(value, cache):
    """Numbers as a cache holds them. fp8_e4m3 has none beyond 448, and NaN must stay NaN; they are rounded to 4 bits,
    or multiples of 2^-9, before they are converted, as not every conversion rounds to the nearest."""
    dtype: tl.constexpr = cache.dtype.element_ty
    if dtype == tl.float8e4nv:
        wide = value.to(tl.float32)
        within = tl.minimum(tl.maximum(wide, -448.0), 448.0)
        bits = within.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        small = (within + 24576.0) - 24576.0
        rounded = tl.where(tl.abs(within) < 0.015625, small, normal)
        return tl.where(wide == wide, rounded, wide).to(dtype)
    else:
        return value.to(dtype)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_kernel(
    k, v, k_cache, v_cache, slots, k_token, k_head, v_token, v_head,
    k_block, k_run, k_slot, v_block, v_run, v_slot,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    H_PAD: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token's keys and values of all heads into its slot; slot -1 is skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    let_next_start(PDL)
    after_previous(PDL)
    if slot >= 0:
        block, offset = slot // SIZE, slot % SIZE
        head = tl.arange(0, H_PAD)[:, None]
        at = tl.arange(0, D_PAD)[None, :]
        live = (head < HEADS) & (at < D)
        key = tl.load(k + token * k_token + head * k_head + at, mask=live, other=0.0)
        place = k_cache + block * k_block + head * k_run + offset * k_slot + at
        tl.store(place, as_stored(key, k_cache), mask=live)
        at = tl.arange(0, DV_PAD)[None, :]
        live = (head < HEADS) & (at < DV)
        value = tl.load(v + token * v_token + head * v_head + at, mask=live, other=0.0)
        place = v_cache + block * v_block + head * v_run + offset * v_slot + at
        tl.store(place, as_stored(value, v_cache), mask=live)


@triton.jit
def turned(
    rows, live, cos, sin, norm, eps,
    HALF: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Both halves of the heads at rows [HEADS, 1], normed and turned, in their dtype."""
    dtype: tl.constexpr = rows.dtype.element_ty
    at = tl.arange(0, WIDTH)[None, :]
    inside = at < HALF
    a = tl.load(rows + at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(rows + HALF + at, mask=live, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF)
        inverse = tl.rsqrt(mean + eps)[:, None]
        first = a * inverse * tl.load(norm + at, mask=inside, other=0.0)
        second = b * inverse * tl.load(norm + HALF + at, mask=inside, other=0.0)
        a, b = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def turn_write_kernel(
    q, k, v, positions, cos_sin, q_norm, k_norm, k_cache, v_cache, slots,
    q_token, q_head, k_token, k_head, v_token, v_head,
    k_block, k_run, k_slot, v_block, v_run, v_slot, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, SIZE: tl.constexpr,
    NORM: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token: of q, which are turned in place, of k, which are turned into their slot, or of v,
    which are copied into theirs. Slot -1 is skipped.

    A program has heads of one of them only: a choice for each head would be one between pointers into different
    memory, which the compiler for AMD's devices does not take.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    at = tl.arange(0, WIDTH)[None, :]
    inside = at < HALF
    angles = cos_sin + tl.load(positions + token) * (2 * HALF)
    cos = tl.load(angles + at, mask=inside, other=0.0)
    sin = tl.load(angles + HALF + at, mask=inside, other=0.0)
    let_next_start(PDL)
    after_previous(PDL)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    order = tl.arange(0, HEADS)[:, None]
    if part < Q_PARTS:
        head = part * HEADS + order
        live = (head < Q_HEADS) & inside
        rows = q + token * q_token + head * q_head
        first, second = turned(rows, live, cos, sin, q_norm, eps, HALF, NORM, WIDTH)
        tl.store(rows + at, first, mask=live)
        tl.store(rows + HALF + at, second, mask=live)
    elif slot >= 0:
        block, offset = slot // SIZE, slot % SIZE
        if part < Q_PARTS + KV_PARTS:
            head = (part - Q_PARTS) * HEADS + order
            live = (head < KV_HEADS) & inside
            rows = k + token * k_token + head * k_head
            first, second = turned(rows, live, cos, sin, k_norm, eps, HALF, NORM, WIDTH)
            place = k_cache + block * k_block + head * k_run + offset * k_slot + at
            tl.store(place, as_stored(first, k_cache), mask=live)
            tl.store(place + HALF, as_stored(second, k_cache), mask=live)
        else:
            head = (part - Q_PARTS - KV_PARTS) * HEADS + order
            live = (head < KV_HEADS) & inside
            values = v + token * v_token + head * v_head + at
            stored = v_cache + block * v_block + head * v_run + offset * v_slot + at
            value = tl.load(values, mask=live, other=0.0)
            tl.store(stored, as_stored(value, v_cache), mask=live)
            value = tl.load(values + HALF, mask=live, other=0.0)
            tl.store(stored + HALF, as_stored(value, v_cache), mask=live)


@triton.jit
def fold(
    q, top, total, acc, ids, n, end, high, blocks, k_head, v_head,
    k_block, k_slot, v_block, v_slot, scale,
    D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    PRECISION: tl.constexpr, CACHED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Keys n .. n + BLOCK_N of a sequence, of those below `end`, folded into the running softmax of rows q [M, D_PAD].

    Row i sees keys below high[i]. CACHED: how loads use caches. AHEAD: `ids` are the blocks that hold the keys, and
    what is returned those of the next ones, so that loads of keys wait for no other load.
    """
    key = n + tl.arange(0, BLOCK_N)
    real = key < end
    if AHEAD:
        block = ids.to(tl.int64)
        after = key + BLOCK_N
        ids = tl.load(blocks + after // SIZE, mask=after < end, other=0)
    else:
        block = tl.load(blocks + key // SIZE, mask=real, other=0).to(tl.int64)
    at = tl.arange(0, D_PAD)
    place = k_head + block * k_block + (key % SIZE) * k_slot
    if AHEAD:
        mask = real[:, None] & (at < D)[None, :]
        keys = tl.load(place[:, None] + at[None, :], mask=mask, other=0.0, cache_modifier=CACHED)
        kt = tl.trans(keys.to(q.dtype))
    else:
        mask = real[None, :] & (at < D)[:, None]
        keys = tl.load(place[None, :] + at[:, None], mask=mask, other=0.0, cache_modifier=CACHED)
        kt = keys.to(q.dtype)
    scores = tl.dot(q, kt, input_precision=PRECISION) * scale
    if SOFTCAP > 0:
        scores = SOFTCAP * tanh(scores / SOFTCAP)
    scores *= LOG2E
    scores = tl.where(key[None, :] < high[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    finite = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - finite[:, None])
    decay = tl.exp2(top - finite)
    total = total * decay + tl.sum(weights, axis=1)
    at = tl.arange(0, DV_PAD)
    place = v_head + block * v_block + (key % SIZE) * v_slot
    mask = real[:, None] & (at < DV)[None, :]
    values = tl.load(place[:, None] + at[None, :], mask=mask, other=0.0, cache_modifier=CACHED)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(q.dtype), values.to(q.dtype), acc, input_precision=PRECISION)
    return new_top, total, acc, ids


@triton.jit
def combine(
    out, partial, lse, request, head, splits, o_token, o_head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """out for the GROUP query heads of a KV head: their parts, weighted by their sums; HEADS x PARTS at a time.

    Loads go past the unit's own cache: other units wrote the parts while this one ran.
    """
    at = tl.arange(0, DV_PAD)
    order = tl.arange(0, PARTS)
    for member in range(0, GROUP, HEADS):
        mine = member + tl.arange(0, HEADS)
        one = head * GROUP + mine
        row = (request * tl.num_programs(1) * GROUP + one) * splits
        top = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, DV_PAD], tl.float32)
        for first in range(0, splits, PARTS):
            live = (mine < GROUP)[:, None] & (first + order < splits)[None, :]
            part = row[:, None] + first + order[None, :]
            logs = tl.load(lse + part, mask=live, other=float("-inf"), cache_modifier=".cg")
            place = partial + part[:, :, None] * DV + at[None, None, :]
            mask = live[:, :, None] & (at < DV)[None, None, :]
            values = tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, tl.max(logs, axis=1))
            finite = tl.where(new_top == float("-inf"), 0.0, new_top)  # no head at all
            weights = tl.exp2(logs - finite[:, None])
            decay = tl.exp2(top - finite)
            acc = acc * decay[:, None] + tl.sum(values * weights[:, :, None], axis=1)
            total = total * decay + tl.sum(weights, axis=1)
            top = new_top
        place = out + request * o_token + one[:, None] * o_head + at[None, :]
        result = (acc / tl.where(total == 0, 1.0, total)[:, None]).to(out.dtype.element_ty)
        tl.store(place, result, mask=(mine < GROUP)[:, None] & (at < DV)[None, :])


@triton.jit
def extent(
    length, split, splits, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, LAST: tl.constexpr
):  # fmt: skip
    """(first key, the one behind the last, parts) of one part of a sequence's keys. With LAST only parts that have keys
    count, at least one of them."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(length - begin, splits), BLOCK_N) * BLOCK_N
    start = begin + split * share
    parts = splits
    if LAST:
        parts = tl.maximum(tl.cdiv(length - begin, tl.maximum(share, BLOCK_N)), 1)
    return start, tl.minimum(start + share, length), parts


@triton.jit
def attend_part(
    queries, out, partial, lse, done, k_cache, v_cache, table, sinks, start, end, parts,
    o_token, o_head, k_block, k_run, k_slot, v_block, v_run, v_slot, table_stride, splits, scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, PRECISION: tl.constexpr, LAST: tl.constexpr,
    HEADS: tl.constexpr, PARTS: tl.constexpr, CACHED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """What decode_kernel says, for the queries [BLOCK_M, D_PAD] of its program."""
    split, head = tl.program_id(0), tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    if LAST:
        beyond = request * tl.num_programs(1) * GROUP * (splits - parts)
        partial += beyond * DV
        lse += beyond
    row = tl.arange(0, BLOCK_M)
    heads = head * GROUP + row
    live = row < GROUP
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        if split == 0:
            top = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32) * LOG2E
            total = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    high = tl.zeros([BLOCK_M], tl.int32) + end
    blocks = table + request * table_stride
    k_head, v_head = k_cache + head * k_run, v_cache + head * v_run
    ids = 0
    if AHEAD:
        key = start + tl.arange(0, BLOCK_N)
        ids = tl.load(blocks + key // SIZE, mask=key < end, other=0)
    for n in range(start, end, BLOCK_N):
        top, total, acc, ids = fold(
            queries, top, total, acc, ids, n, end, high, blocks, k_head, v_head,
            k_block, k_slot, v_block, v_slot, scale,
            D, DV, SIZE, SOFTCAP, BLOCK_N, D_PAD, DV_PAD, PRECISION, CACHED, AHEAD,
        )  # fmt: skip
    at = tl.arange(0, DV_PAD)
    inside = live[:, None] & (at < DV)[None, :]
    empty = total == 0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    if parts == 1:
        places = out + request * o_token + heads * o_head
        tl.store(places[:, None] + at[None, :], acc.to(out.dtype.element_ty), mask=inside)
    else:
        part = (request * tl.num_programs(1) * GROUP + heads) * parts + split
        tl.store(partial + part[:, None] * DV + at[None, :], acc, mask=inside)
        logs = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(lse + part, logs, mask=live)
        if LAST:
            count = done + request * tl.num_programs(1) + head
            tl.debug_barrier()  # what all threads of the program stored comes before the count
            if tl.atomic_add(count, 1, sem="acq_rel") == parts - 1:
                tl.store(count, 0)
                combine(
                    out, partial, lse, request, head, parts, o_token, o_head,
                    GROUP, HEADS, PARTS, DV, DV_PAD,
                )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "splits"])
def decode_kernel(
    out, partial, lse, done, q, k_cache, v_cache, seq_lens, table, sinks,
    o_token, o_head, q_token, q_head, k_block, k_run, k_slot, v_block, v_run, v_slot,
    table_stride, splits, scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    PRECISION: tl.constexpr, LAST: tl.constexpr,
    HEADS: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr, BESIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Request b, one query token: a program for each of `splits` parts of its keys.

    With one part the result goes to `out`; else normalised results go to partial [B, Hq, splits, DV] and the
    logarithms (to base 2) of their sums to lse [B, Hq, splits]. With LAST the program that ends last for a request
    and KV head, by the count in done [B, Hkv], combines the parts and leaves the count at 0 for the next launch; and
    only the parts that have keys exist, packed to the front of the request's memory: a graph has as many programs as
    the longest sequence needs.

    BESIDE: behind prefill_kernel, both with PDL. This kernel started when all programs of that one had waited for what
    is before them, so that keys and queries are there; past the unit's own cache, which may hold what was there before.
    None of that kernel's results is needed, so it waits for no more than to end after it, for those that come later:
    one program is enough, and of the others none holds a place that those behind it want.
    """
    split, head = tl.program_id(0), tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    length = tl.load(seq_lens + request)
    let_next_start(PDL)
    after_previous(PDL and not BESIDE)
    CACHED: tl.constexpr = ".cg" if BESIDE else ""
    start, end, parts = extent(length, split, splits, WINDOW, BLOCK_N, LAST)
    if split >= parts:
        return
    row = tl.arange(0, BLOCK_M)
    at = tl.arange(0, D_PAD)
    places = q + request * q_token + (head * GROUP + row) * q_head
    mask = (row < GROUP)[:, None] & (at < D)[None, :]
    queries = tl.load(places[:, None] + at[None, :], mask=mask, other=0.0, cache_modifier=CACHED)
    attend_part(
        queries, out, partial, lse, done, k_cache, v_cache, table, sinks, start, end, parts,
        o_token, o_head, k_block, k_run, k_slot, v_block, v_run, v_slot, table_stride, splits, scale,
        GROUP, D, DV, SIZE, SOFTCAP, SINKS, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, PRECISION, LAST,
        HEADS, PARTS, CACHED, AHEAD,
    )  # fmt: skip
    if BESIDE:
        if (split == 0) & (head == tl.num_programs(1) - 1) & (request == tl.num_programs(2) - 1):
            after_previous(PDL)


@triton.jit(do_not_specialize=["table_stride", "splits"], do_not_specialize_on_alignment=["slots"])
def turn_decode_kernel(
    out, partial, lse, done, q, k, v, positions, cos_sin, q_norm, k_norm, slots,
    k_cache, v_cache, seq_lens, table, sinks,
    o_token, o_head, q_token, q_head, k_token, k_head, v_token, v_head,
    k_block, k_run, k_slot, v_block, v_run, v_slot, table_stride, splits, scale, eps,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    PRECISION: tl.constexpr, LAST: tl.constexpr,
    HEADS: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """decode_kernel behind turn_write_kernel, for heads of D = DV = D_PAD numbers, all of which are turned.

    Every program turns its queries; the one whose part ends with the newest key turns that key and writes it and its
    value before it reads its part.
    """
    HALF: tl.constexpr = D // 2
    split, head = tl.program_id(0), tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    length = tl.load(seq_lens + request)
    slot = tl.load(slots + request)
    at = tl.arange(0, HALF)[None, :]
    angles = cos_sin + tl.load(positions + request) * D
    cos = tl.load(angles + at)
    sin = tl.load(angles + HALF + at)
    let_next_start(PDL)
    after_previous(PDL)
    start, end, parts = extent(length, split, splits, WINDOW, BLOCK_N, LAST)
    if split >= parts:
        return
    if (split == parts - 1) & (slot >= 0):
        block, offset = slot // SIZE, slot % SIZE
        one = tl.arange(0, 1)[:, None]
        rows = k + request * k_token + head * k_head + one
        first, second = turned(rows, at >= one, cos, sin, k_norm, eps, HALF, NORM, HALF)
        place = k_cache + block * k_block + head * k_run + offset * k_slot + at
        tl.store(place, as_stored(first, k_cache))
        tl.store(place + HALF, as_stored(second, k_cache))
        values = v + request * v_token + head * v_head + at
        place = v_cache + block * v_block + head * v_run + offset * v_slot + at
        tl.store(place, as_stored(tl.load(values), v_cache))
        tl.store(place + HALF, as_stored(tl.load(values + HALF), v_cache))
        tl.debug_barrier()  # all threads read what each of them wrote
    row = tl.arange(0, BLOCK_M)
    rows = (q + request * q_token + (head * GROUP + row) * q_head)[:, None]
    live = (row < GROUP)[:, None] & (at >= 0)
    first, second = turned(rows, live, cos, sin, q_norm, eps, HALF, NORM, HALF)
    queries = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (BLOCK_M, D))
    attend_part(
        queries, out, partial, lse, done, k_cache, v_cache, table, sinks, start, end, parts,
        o_token, o_head, k_block, k_run, k_slot, v_block, v_run, v_slot, table_stride, splits, scale,
        GROUP, D, DV, SIZE, SOFTCAP, SINKS, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, PRECISION, LAST,
        HEADS, PARTS, "", AHEAD,
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    out, partial, lse, splits, o_token, o_head, GROUP: tl.constexpr, HEADS: tl.constexpr,
    PARTS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Where decode_kernel leaves that: the parts of one request and KV head."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    let_next_start(PDL)
    after_previous(PDL)
    combine(
        out, partial, lse, request, head, splits, o_token, o_head,
        GROUP, HEADS, PARTS, DV, DV_PAD,
    )  # fmt: skip
