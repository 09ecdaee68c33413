"""The kernel of paged attention for prompts and chunks. Caches, GROUP and scores: attention_kernels.py."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.platforms.triton.activations import tanh
from headrace.platforms.triton.launch import after_previous, let_next_start

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def rows_at(head_start, rows, live, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """Rows [BLOCK_N, PAD] of one head of a cache; zeros where not `live`."""
    at = tl.arange(0, PAD)
    mask = live[:, None]
    if WIDTH < PAD:
        mask &= (at < WIDTH)[None, :]
    return tl.load(head_start + rows[:, None] + at[None, :], mask=mask, other=0.0)


@triton.jit
def tile_at(tiles, starts, seq_lens, turn, count):
    """Of a program's tile at its `turn`: request, first token in the tile, first row of the request, its tokens and
    the keys before them; no tokens where there is no such tile.

    Tiles come with the longest first, so programs take them to and fro: who had the longest has the shortest next.
    """
    programs, mine = tl.num_programs(0), tl.program_id(0)
    tile = turn * programs + tl.where(turn % 2 == 0, mine, programs - 1 - mine)
    there = tile < count
    request = tl.load(tiles + 2 * tile, mask=there, other=0)
    first = tl.load(tiles + 2 * tile + 1, mask=there, other=0)
    start = tl.load(starts + request)
    tokens = tl.load(starts + request + 1) - start
    context = tl.load(seq_lens + request) - tokens
    return request, first, start, tl.where(there, tokens, 0), context


@triton.jit
def keys_of(
    first, tokens, context, TOKENS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
):
    """(first key, the one behind the last) that a tile's rows see; none if it has no token."""
    end = tl.where(first < tokens, context + tl.minimum(first + TOKENS, tokens), 0)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context + first + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    return begin, end


@triton.jit(do_not_specialize=["table_stride", "count"])
def prefill_kernel(
    out, q, k_cache, v_cache, tiles, starts, seq_lens, table, sinks,
    o_token, o_head, q_token, q_head, block_stride, run_stride, slot_stride, table_stride,
    count, scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    PRECISION: tl.constexpr, TOGETHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """tiles [count, 2] int32: (request, its first token in the tile); a tile has BLOCK_M // GROUP tokens, or none
    where the first one lies behind the request's last.

    The numbers of the blocks that hold the next keys are loaded while these keys are multiplied, so that loads of keys
    wait for no other load and several are on their way; only keys that some row does not see are compared with rows.
    Both caches have the same strides: what lies where in them is computed once. TOGETHER: values are asked for with
    their keys, not after the softmax: where they do not wait in registers.

    With PDL the next kernel may start once all programs run and the one before has ended: what that one wrote is there
    for it too, what this one writes is not.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    order = tl.arange(0, BLOCK_N)
    heads = head * GROUP + row % GROUP
    request, first, start, tokens, context = tile_at(tiles, starts, seq_lens, 0, count)
    begin, end = keys_of(first, tokens, context, TOKENS, WINDOW, BLOCK_N)
    blocks = table + request.to(tl.int64) * table_stride
    ids = tl.load(blocks + (begin + order) // SIZE, mask=begin + order < end, other=0)
    after_previous(PDL)
    let_next_start(PDL)
    for turn in range(tl.cdiv(count, tl.num_programs(0))):
        token = first + row // GROUP
        live = (row < TOKENS * GROUP) & (token < tokens)
        rows = (start + token).to(tl.int64)
        at = tl.arange(0, D_PAD)
        places = q + rows * q_token + heads * q_head
        mask = live[:, None] & (at < D)[None, :]
        queries = tl.load(places[:, None] + at[None, :], mask=mask, other=0.0)
        high = context + token + 1
        all_see = context + first + 1  # keys
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:
            top = tl.load(sinks + heads).to(tl.float32) * LOG2E
            total = tl.full([BLOCK_M], 1.0, tl.float32)
        acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
        request, first, start, tokens, context = tile_at(tiles, starts, seq_lens, turn + 1, count)
        for n in range(begin, end, BLOCK_N):
            key = n + order
            stored = ids.to(tl.int64) * block_stride + key % SIZE * slot_stride
            keys = rows_at(k_cache + head * run_stride, stored, key < end, D, D_PAD)
            if TOGETHER:
                values = rows_at(v_cache + head * run_stride, stored, key < end, DV, DV_PAD)
            after = key + BLOCK_N
            ids = tl.load(blocks + after // SIZE, mask=after < end, other=0)
            keys = tl.trans(keys.to(queries.dtype))
            scores = tl.dot(queries, keys, input_precision=PRECISION)
            factor = scale * LOG2E
            if SOFTCAP > 0:
                scores = tanh(scores * (scale / SOFTCAP))
                factor = SOFTCAP * LOG2E
            hidden = n + BLOCK_N > all_see
            if WINDOW > 0:
                hidden |= n < end - WINDOW
            if hidden:
                visible = key[None, :] < high[:, None]
                if WINDOW > 0:
                    visible &= key[None, :] >= (high - WINDOW)[:, None]
                scores = tl.where(visible, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
            finite = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores * factor - finite[:, None])
            decay = tl.exp2(top - finite)
            total = total * decay + tl.sum(weights, axis=1)
            acc = acc * decay[:, None]
            if not TOGETHER:
                values = rows_at(v_cache + head * run_stride, stored, key < end, DV, DV_PAD)
            values = values.to(queries.dtype)
            acc = tl.dot(weights.to(queries.dtype), values, acc, input_precision=PRECISION)
            top = new_top
        begin, end = keys_of(first, tokens, context, TOKENS, WINDOW, BLOCK_N)
        blocks = table + request.to(tl.int64) * table_stride
        ids = tl.load(blocks + (begin + order) // SIZE, mask=begin + order < end, other=0)
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        at = tl.arange(0, DV_PAD)
        places = out + rows * o_token + heads * o_head
        mask = live[:, None] & (at < DV)[None, :]
        tl.store(places[:, None] + at[None, :], acc.to(out.dtype.element_ty), mask=mask)
