"""Trials of attention over prompts, for trials.py: alone, behind a cached prefix, and in steps where others decode."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import torch

from benchmarks.cuda.trial import COPIES, MULTIPLY, READ, Call, Changed, Trial, options
from headrace.platforms.queries import AttentionQuery
from headrace.platforms.reference.cases import Requests, make_batch, make_caches, scattered_blocks
from headrace.platforms.triton.attention import TritonAttention

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
NAMES = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "PROGRAMS")
SPACE = {
    64: options(
        NAMES, (128, 64, 4, 3, 0), (128, 64, 4, 3, 1), (128, 64, 4, 3, 2), (128, 64, 4, 4, 0),
        (128, 32, 8, 4, 0), (128, 32, 8, 4, 1), (64, 64, 4, 2, 0), (64, 64, 4, 2, 3),
    ),
    128: options(
        NAMES, (128, 64, 8, 4, 1), (128, 64, 8, 4, 0), (128, 64, 8, 3, 1), (128, 64, 8, 3, 0),
        (128, 128, 8, 3, 1), (64, 64, 4, 3, 2), (64, 64, 4, 3, 1),
    ),
    256: options(
        NAMES, (128, 64, 8, 2, 1), (128, 64, 8, 2, 0), (128, 32, 8, 3, 1), (128, 32, 8, 3, 0),
    ),
}  # fmt: skip


# prompts with registers left to decodes beside them, and such decodes
BESIDE = options(
    (*NAMES, "maxnreg"), (128, 64, 8, 3, 1, 255), (128, 64, 8, 3, 1, 192), (128, 64, 8, 3, 1, 168),
    (128, 32, 8, 4, 1, 168), (64, 64, 4, 3, 1, 255), (64, 64, 4, 3, 2, 255),
)  # fmt: skip
DECODES = options(
    ("BLOCK_N", "num_warps", "num_stages", "AHEAD"), (32, 1, 2, 0), (32, 1, 3, 1), (16, 1, 4, 1),
    (16, 1, 3, 1),
)  # fmt: skip


def prefill_trials() -> Iterator[Trial]:
    for heads in HEADS:
        for name in BATCHES if heads[2] == 128 else ("1 x 1,024", "8 x 1,024"):
            load, mixed = (*heads, name), name.startswith("112")
            yield Trial("prefill", load)
            if not mixed:
                yield from (Trial("prefill", load, {"prefill": one}) for one in SPACE[heads[2]])
                continue
            yield Trial("prefill", load, way="apart")
            for prompts, decodes in product(BESIDE, DECODES):
                changes = {"prefill_beside": prompts, "decode_beside": decodes}
                yield Trial("prefill", load, changes)


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
    op.overlap &= trial.way != "apart"
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
