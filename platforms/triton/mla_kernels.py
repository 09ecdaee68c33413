"""Kernels of attention over a latent cache: paged attention with one KV head whose values are the first DV numbers of
its keys (KVSpec.latent). Caches [P, 1, S, D] of any strides with unit stride along D.

Each key is read once, for the product with the queries and for that with the weights. Query heads are divided over
programs, GROUP to each: 128 heads at once would need more registers than there are. Keys are two operands, DV numbers
and the rest, as 576 is no power of two. Else as in attention_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.platforms.triton.attention_kernels import LOG2E, as_stored, combine
from headrace.platforms.triton.launch import after_previous, let_next_start


@triton.jit(do_not_specialize_on_alignment=["slots"])
def latent_write_kernel(
    k, k_cache, slots, k_token, k_block, k_slot,
    D: tl.constexpr, SIZE: tl.constexpr, D_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token's row into its slot; slot -1 is skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    let_next_start(PDL)
    after_previous(PDL)
    if slot >= 0:
        at = tl.arange(0, D_PAD)
        row = tl.load(k + token * k_token + at, mask=at < D, other=0.0)
        place = k_cache + (slot // SIZE) * k_block + (slot % SIZE) * k_slot + at
        tl.store(place, as_stored(row, k_cache), mask=at < D)


@triton.jit
def load_queries(
    places, live, D: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, REST_PAD: tl.constexpr
):  # fmt: skip
    """Rows of q [M, D] as [M, DV_PAD] and [M, REST_PAD]."""
    at = tl.arange(0, DV_PAD)
    first = tl.load(
        places[:, None] + at[None, :], mask=live[:, None] & (at < DV)[None, :], other=0.0
    )
    at = DV + tl.arange(0, REST_PAD)
    rest = tl.load(places[:, None] + at[None, :], mask=live[:, None] & (at < D)[None, :], other=0.0)
    return first, rest


@triton.jit
def latent_fold(
    q, q_rest, top, total, acc, n, end, high, blocks, k_cache, k_block, k_slot, scale,
    D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    DV_PAD: tl.constexpr, REST_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys n .. n + BLOCK_N of a sequence folded into the running softmax of rows q [M, DV_PAD], q_rest [M, REST_PAD].

    Row i sees keys below high[i]. `end` bounds what may be loaded.
    """
    key = n + tl.arange(0, BLOCK_N)
    real = key < end
    block = tl.load(blocks + key // SIZE, mask=real, other=0).to(tl.int64)
    place = k_cache + block * k_block + (key % SIZE) * k_slot
    at = tl.arange(0, DV_PAD)
    values = tl.load(
        place[:, None] + at[None, :], mask=real[:, None] & (at < DV)[None, :], other=0.0
    ).to(q.dtype)
    at = DV + tl.arange(0, REST_PAD)
    rest = tl.load(
        place[None, :] + at[:, None], mask=real[None, :] & (at < D)[:, None], other=0.0
    ).to(q.dtype)
    scores = tl.dot(q_rest, rest, input_precision=PRECISION)
    scores = tl.dot(q, tl.trans(values), scores, input_precision=PRECISION) * (scale * LOG2E)
    scores = tl.where(key[None, :] < high[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    finite = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - finite[:, None])
    decay = tl.exp2(top - finite)
    total = total * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(q.dtype), values, acc, input_precision=PRECISION)
    return new_top, total, acc


@triton.jit(do_not_specialize=["table_stride"])
def latent_prefill_kernel(
    out, q, k_cache, tiles, starts, seq_lens, table,
    o_token, o_head, q_token, q_head, k_block, k_slot, table_stride, scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DV_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """tiles [N, 2] int32: (request, its first token in the tile); a tile has BLOCK_M // GROUP tokens."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile, part = tl.program_id(0), tl.program_id(1)
    request = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    context = tl.load(seq_lens + request) - count
    row = tl.arange(0, BLOCK_M)
    token = first + row // GROUP
    heads = part * GROUP + row % GROUP
    live = (row < TOKENS * GROUP) & (token < count)
    rows = (start + token).to(tl.int64)
    queries, rest = load_queries(q + rows * q_token + heads * q_head, live, D, DV, DV_PAD, REST_PAD)
    high = context + token + 1
    end = tl.where(first < count, context + tl.minimum(first + TOKENS, count), 0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    blocks = table + request.to(tl.int64) * table_stride
    for n in range(0, end, BLOCK_N):
        top, total, acc = latent_fold(
            queries, rest, top, total, acc, n, end, high, blocks, k_cache, k_block, k_slot, scale,
            D, DV, SIZE, BLOCK_N, DV_PAD, REST_PAD, PRECISION,
        )  # fmt: skip
    at = tl.arange(0, DV_PAD)
    places = out + rows * o_token + heads * o_head
    tl.store(
        places[:, None] + at[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=live[:, None] & (at < DV)[None, :],
    )


@triton.jit(do_not_specialize=["table_stride", "splits"])
def latent_decode_kernel(
    out, partial, lse, done, q, k_cache, seq_lens, table,
    o_token, o_head, q_token, q_head, k_block, k_slot, table_stride, splits, scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DV_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    PRECISION: tl.constexpr, LAST: tl.constexpr,
    HEADS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Request b, one query token: a program for each of `splits` parts of its keys and each GROUP heads.

    What goes where is as in decode_kernel, with a part of the heads in place of a KV head.
    """
    split, part = tl.program_id(0), tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    length = tl.load(seq_lens + request)
    let_next_start(PDL)
    after_previous(PDL)
    share = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    start = split * share
    end = tl.minimum(start + share, length)
    row = tl.arange(0, BLOCK_M)
    heads = part * GROUP + row
    live = row < GROUP
    queries, rest = load_queries(
        q + request * q_token + heads * q_head, live, D, DV, DV_PAD, REST_PAD
    )
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    high = tl.zeros([BLOCK_M], tl.int32) + end
    blocks = table + request * table_stride
    for n in range(start, end, BLOCK_N):
        top, total, acc = latent_fold(
            queries, rest, top, total, acc, n, end, high, blocks, k_cache, k_block, k_slot, scale,
            D, DV, SIZE, BLOCK_N, DV_PAD, REST_PAD, PRECISION,
        )  # fmt: skip
    at = tl.arange(0, DV_PAD)
    inside = live[:, None] & (at < DV)[None, :]
    empty = total == 0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    if splits == 1:
        places = out + request * o_token + heads * o_head
        tl.store(places[:, None] + at[None, :], acc.to(out.dtype.element_ty), mask=inside)
    else:
        place = (request * tl.num_programs(1) * GROUP + heads) * splits + split
        tl.store(partial + place[:, None] * DV + at[None, :], acc, mask=inside)
        logs = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(lse + place, logs, mask=live)
        if LAST:
            count = done + request * tl.num_programs(1) + part
            tl.debug_barrier()  # what all threads of the program stored comes before the count
            if tl.atomic_add(count, 1, sem="acq_rel") == splits - 1:
                tl.store(count, 0)
                combine(
                    out, partial, lse, request, part, splits, o_token, o_head,
                    GROUP, HEADS, PARTS, DV, DV_PAD,
                )  # fmt: skip
