"""Trials of attention over prompts, for trials.py: alone, behind a cached prefix, and in steps where others decode."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.cuda.trial import COPIES, MULTIPLY, READ, Call, Changed, Trial, options
from headrace.platforms.queries import AttentionQuery
from headrace.platforms.reference.cases import Requests, make_batch, make_caches, scattered_blocks
from headrace.platforms.triton.attention import TritonAttention
from headrace.platforms.triton.attention_kernels import LOG2E, fold
from headrace.platforms.triton.launch import Launchers, after_previous, let_next_start

DEVICE = torch.device("cuda")
BLOCK = 32
# query heads, KV heads, head size
HEADS = ((32, 8, 128), (32, 4, 128), (32, 8, 64), (8, 4, 256))
# (keys, new tokens) of each request, those that decode first
BATCHES = {
    "1 x 512": ((512, 512),),
    "1 x 1,024": ((1024, 1024),),
    "8 x 1,024": ((1024, 1024),) * 8,
    "512 behind 8,000": ((8512, 512),),
    "112 decode, 912 of prompts": ((1150, 1),) * 112 + ((1024, 456),) * 2,
}
NAMES = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
BEFORE = options(NAMES, (128, 64, 4, 3))[0]
SPACE = options(
    NAMES, (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 8, 2), (128, 128, 8, 2),
    (128, 128, 8, 3), (128, 32, 8, 4), (128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2),
    (64, 128, 4, 2), (64, 32, 4, 4),
)  # fmt: skip
# two programs of 128 rows on one unit
SPACE += options((*NAMES, "maxnreg"), (128, 64, 8, 2, 128), (128, 32, 8, 4, 128))
WIDE = options(
    NAMES, (64, 32, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (128, 32, 8, 2), (128, 64, 8, 2),
    (128, 32, 8, 3), (64, 32, 4, 3),
)  # fmt: skip
# with registers left to programs beside
SHARED = options(
    (*NAMES, "maxnreg"), (128, 64, 8, 3, 255), (128, 64, 8, 3, 168), (128, 32, 8, 5, 168),
    (64, 64, 4, 3, 255), (64, 32, 4, 4, 255),
)  # fmt: skip
# prompts and decodes of one step: one after the other, or with so many programs of prompts for each unit
WAYS = ("apart", "1 a unit", "2 a unit", "all")


def prefill_trials() -> Iterator[Trial]:
    for heads in HEADS:
        wide = heads[2] > 128
        for name in BATCHES if heads[2] == 128 else ("1 x 1,024", "8 x 1,024"):
            load, mixed = (*heads, name), name.startswith("112")
            before = WIDE[0] if wide else BEFORE
            yield Trial("prefill", load, {"prefill": before}, "before, apart")
            space = WIDE if wide else SHARED if mixed else SPACE
            for way in WAYS if mixed else ("",):
                yield from (Trial("prefill", load, {"prefill": change}, way) for change in space)


@cache
def inputs(runtime: Any, load: tuple[Any, ...], copies: int) -> Any:
    q_heads, kv_heads, size, name = load
    query = AttentionQuery(q_heads, kv_heads, size, size, "bfloat16", "bfloat16", size**-0.5)
    requests = Requests(BATCHES[name])
    table = scattered_blocks(requests, BLOCK, 0)
    blocks = 1 + int(table.max())
    count = min(copies, max(1, (2 << 30) // (4 * kv_heads * size * blocks * BLOCK)))
    op = TritonAttention(query, runtime)
    caches = [make_caches(op, BLOCK, blocks, DEVICE) for _ in range(count)]
    for one in (one for pair in caches for one in pair):
        one.normal_()
    tokens = sum(new for _, new in requests.lengths)
    q = torch.randn(tokens, q_heads, size, device=DEVICE, dtype=torch.bfloat16)
    return query, q, caches, make_batch(requests, table, BLOCK, DEVICE)


def prefill_calls(runtime: Any, trial: Trial, copies: int) -> list[Call]:
    query, q, caches, batch = inputs(runtime, trial.load, 1 if copies == 1 else COPIES)
    op = TritonAttention(query, Changed(runtime, trial.changes))
    op.beside *= {"apart": 0, "before, apart": 0, "2 a unit": 2, "all": 1000}.get(trial.way, 1)
    if trial.way.startswith("before"):
        op._prefill = Launchers(before_kernel, op._prefill.options)
    plan = op.plan(batch, 0)
    return [lambda c=c: op.attend(q, *c, plan) for c in caches]  # type: ignore[misc]


def operations(load: tuple[Any, ...]) -> float:
    """Of the prompts: two products of every query with the keys that it sees."""
    pairs = sum(new * keys - new * (new - 1) // 2 for keys, new in BATCHES[load[3]] if new > 1)
    return 4.0 * load[0] * load[2] * pairs


def prefill_limit(load: tuple[Any, ...]) -> float:
    """Seconds: arithmetic of the prompts, or what decodes read."""
    read = 4 * load[1] * load[2] * sum(keys for keys, new in BATCHES[load[3]] if new == 1)
    return max(operations(load) / MULTIPLY, read / READ)


SECTIONS = {"prefill": (prefill_trials, prefill_calls, prefill_limit)}


@triton.jit(do_not_specialize=["table_stride", "count"])
def before_kernel(
    out, q, k_cache, v_cache, tiles, starts, seq_lens, table, sinks,
    o_token, o_head, q_token, q_head, k_block, k_run, k_slot, table_stride, count, scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What prefill_kernel was."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    after_previous(PDL)
    let_next_start(PDL)
    tile, head = tl.program_id(0), tl.program_id(1)
    request = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    start = tl.load(starts + request)
    tokens = tl.load(starts + request + 1) - start
    context = tl.load(seq_lens + request) - tokens
    row = tl.arange(0, BLOCK_M)
    token = first + row // GROUP
    heads = head * GROUP + row % GROUP
    live = (row < TOKENS * GROUP) & (token < tokens)
    rows = (start + token).to(tl.int64)
    at = tl.arange(0, D_PAD)
    places = q + rows * q_token + heads * q_head
    queries = tl.load(
        places[:, None] + at[None, :], mask=live[:, None] & (at < D)[None, :], other=0.0
    )
    high = context + token + 1
    low = high - WINDOW
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context + first + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    end = context + tl.minimum(first + TOKENS, tokens)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        top = tl.load(sinks + heads).to(tl.float32) * LOG2E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    blocks = table + request.to(tl.int64) * table_stride
    k_head, v_head = k_cache + head * k_run, v_cache + head * k_run
    for n in range(begin, end, BLOCK_N):
        top, total, acc = fold(
            queries, top, total, acc, n, end, low, high, blocks, k_head, v_head,
            k_block, k_slot, k_block, k_slot, scale,
            D, DV, SIZE, SOFTCAP, WINDOW, BLOCK_N, D_PAD, DV_PAD, PRECISION, "",
        )  # fmt: skip
    acc = acc / total[:, None]
    at = tl.arange(0, DV_PAD)
    places = out + rows * o_token + heads * o_head
    tl.store(
        places[:, None] + at[None, :],
        acc.to(out.dtype.element_ty),
        mask=live[:, None] & (at < DV)[None, :],
    )
