"""Trials of the experts of Qwen3-30B-A3B, for trials.py: kernels for one pair, tiles of pairs, tiles that the device
copies, and what each kernel of a layer takes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import torch

from benchmarks.cuda.trial import (
    COPIES,
    MULTIPLY,
    PRODUCT,
    READ,
    ROW,
    Call,
    Changed,
    Trial,
    options,
)
from headrace.platforms.queries import ExpertsQuery
from headrace.platforms.triton.experts import TritonExperts, Work, most_tiles, tile_rows

DEVICE = torch.device("cuda")
# experts, of them for a token, hidden, intermediate
EXPERTS = {"Qwen3-30B-A3B": (128, 8, 2048, 768)}

ROW_GATE_UP = options(
    ROW, (1, 2048, 2), (1, 2048, 4), (2, 2048, 4), (2, 2048, 8), (4, 2048, 8), (4, 1024, 4),
    (4, 512, 4), (2, 1024, 4), (8, 512, 4), (2, 1024, 2),
)  # fmt: skip
ROW_DOWN = options(
    ROW, (1, 1024, 4), (1, 1024, 8), (2, 1024, 8), (1, 256, 4), (2, 256, 4), (2, 256, 8),
    (4, 256, 8), (2, 128, 4), (4, 128, 4), (2, 512, 8), (1, 512, 4),
)  # fmt: skip
FEW_GATE_UP = options(
    PRODUCT, (32, 128, 4, 3), (64, 64, 4, 4), (16, 128, 2, 4), (16, 256, 4, 3), (32, 128, 2, 4),
    (32, 128, 4, 4), (32, 256, 4, 3), (64, 128, 4, 3),
)  # fmt: skip
FEW_DOWN = options(
    PRODUCT, (64, 128, 4, 3), (32, 128, 4, 4), (32, 256, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4),
    (64, 256, 4, 2), (128, 128, 4, 3),
)  # fmt: skip
TILES_GATE_UP = {
    16: options(PRODUCT, (64, 64, 4, 4), (32, 128, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4),
                (128, 64, 4, 3), (128, 64, 8, 4), (64, 64, 4, 5)),
    32: options(PRODUCT, (64, 64, 4, 4), (32, 128, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4),
                (128, 64, 4, 3), (128, 64, 8, 4)),
    64: options(PRODUCT, (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3),
                (128, 64, 4, 4), (64, 128, 4, 3)),
    128: options(PRODUCT, (64, 64, 8, 3), (64, 64, 8, 4), (64, 64, 4, 4), (128, 64, 8, 3),
                 (128, 64, 8, 4), (128, 32, 8, 4), (64, 128, 8, 3), (128, 128, 8, 2)),
}  # fmt: skip
TILES_DOWN = {
    16: options(PRODUCT, (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 3),
                (256, 64, 4, 3), (64, 256, 4, 2)),
    32: options(PRODUCT, (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 3),
                (256, 64, 8, 3)),
    64: options(PRODUCT, (128, 64, 4, 3), (128, 64, 4, 4), (256, 64, 8, 3), (64, 128, 4, 3),
                (128, 128, 4, 3)),
    128: options(PRODUCT, (128, 64, 8, 3), (128, 64, 8, 4), (256, 64, 8, 3), (256, 64, 8, 4),
                 (128, 64, 4, 4), (128, 128, 8, 3)),
}  # fmt: skip
# tokens -> heights of tiles to try; where the options of a height are tried, and which of them elsewhere
HEIGHTS = {32: (16,), 64: (16,), 128: (16, 32), 256: (16, 32, 64), 512: (32, 64), 1024: (64, 128),
           2048: (64, 128), 8192: (64, 128)}  # fmt: skip
SEARCHED = {64: 16, 256: 32, 512: 64, 8192: 128}


def experts_trials() -> Iterator[Trial]:
    for tokens in (1, 2, 3, 4, 8):
        ways = ("few", "row") if tokens > 2 else ("row", "few")[:tokens]
        yield from (Trial("experts", (tokens,), way=way) for way in ways)
    for kernel, row, few in (
        ("gate_up", ROW_GATE_UP, FEW_GATE_UP),
        ("down", ROW_DOWN, FEW_DOWN),
    ):
        for change in row:
            yield Trial("experts", (1,), {f"experts_{kernel}_row": change}, "row")
        for tokens in (4, 16):
            for change in few:
                yield Trial("experts", (tokens,), {f"experts_{kernel}_few": change}, "few")
    for tokens, heights in HEIGHTS.items():
        for height in heights:
            yield Trial("experts", (tokens,), way=str(height))
    for tokens, height in SEARCHED.items():
        for kernel, table in (("gate_up", TILES_GATE_UP), ("down", TILES_DOWN)):
            for change in table[height]:
                changes = {f"experts_{kernel} {height}": change}
                yield Trial("experts", (tokens,), changes, str(height))


@cache
def experts_weights(copies: int) -> list[Any]:
    (shape,) = EXPERTS.values()
    count, _, hidden, size = shape
    like = {"device": DEVICE, "dtype": torch.bfloat16}
    return [
        (
            torch.randn(count, 2 * size, hidden, **like).mul_(hidden**-0.5),
            torch.randn(count, hidden, size, **like).mul_(size**-0.5),
        )
        for _ in range(copies)
    ]


@cache
def experts_inputs(tokens: int) -> tuple[Any, list[Any]]:
    (shape,) = EXPERTS.values()
    torch.manual_seed(tokens)
    x = torch.randn(tokens, shape[2], device=DEVICE, dtype=torch.bfloat16)
    chosen = []
    for _ in range(COPIES):
        logits, ids = torch.randn(tokens, shape[0], device=DEVICE).topk(shape[1])
        chosen.append((logits.softmax(1), ids.int()))
    return x, chosen


def experts_calls(runtime: Any, trial: Trial, copies: int) -> list[Call]:
    (shape,) = EXPERTS.values()
    op = TritonExperts(ExpertsQuery(*shape, "bfloat16"), Changed(runtime, trial.changes))
    x, chosen = experts_inputs(*trial.load)
    packed = experts_weights(copies)

    def call(routed: Any, weights: Any) -> Any:
        out = torch.empty_like(x)
        if trial.way == "row":
            op._row(x, *routed, weights, out)
        else:
            rows = 0 if trial.way == "few" else int(trial.way)
            op._rows((x, *routed), weights, out, rows)
        return out

    return [lambda c=c, p=p: call(c, p) for c, p in zip(chosen, packed, strict=False)]


def experts_limit(load: tuple[Any, ...]) -> float:
    (shape,) = EXPERTS.values()
    _, top_k, hidden, size = shape
    used = sum(len(ids.unique()) for _, ids in experts_inputs(*load)[1]) / COPIES
    return max(used * 6 * size * hidden / READ, 6 * load[0] * top_k * size * hidden / MULTIPLY)


# -- experts over copied tiles, and where the time of an experts' layer goes -------------------------------------------

TILED = ("SWAP", "AHEAD", "PROGRAMS", *PRODUCT)
# by the rows of a tile
TILED_GATE_UP = {
    16: ((1, 0, 2, 64, 64, 4, 5), (1, 0, 2, 64, 128, 4, 3), (1, 0, 1, 64, 128, 4, 5),
         (1, 0, 1, 128, 64, 4, 5), (1, 0, 3, 64, 64, 4, 3), (1, 0, 0, 64, 64, 4, 4),
         (1, 0, 0, 64, 128, 4, 3), (1, 512, 2, 64, 128, 4, 3), (0, 0, 2, 64, 64, 4, 5)),
    32: ((1, 0, 2, 64, 64, 4, 5), (1, 0, 1, 64, 128, 4, 5), (1, 0, 1, 128, 64, 4, 5),
         (1, 0, 3, 64, 64, 4, 3), (1, 0, 0, 64, 64, 4, 4), (1, 0, 0, 64, 64, 4, 5),
         (1, 512, 2, 64, 64, 4, 5), (0, 0, 2, 64, 64, 4, 5)),
    64: ((1, 0, 2, 64, 64, 4, 4), (1, 0, 0, 64, 64, 4, 4), (1, 0, 1, 128, 64, 8, 4),
         (0, 0, 1, 128, 64, 4, 4), (0, 0, 2, 64, 64, 4, 3), (0, 0, 0, 64, 64, 4, 4)),
    128: ((0, 0, 0, 128, 64, 8, 3), (0, 0, 0, 128, 64, 8, 4), (0, 0, 1, 128, 64, 8, 3),
          (0, 0, 1, 128, 64, 8, 4), (0, 0, 0, 64, 64, 4, 3), (0, 0, 2, 64, 64, 4, 3)),
}  # fmt: skip
TILED_DOWN = {
    16: ((1, 0, 2, 128, 64, 4, 5), (1, 0, 2, 128, 128, 4, 3), (1, 0, 1, 128, 128, 4, 5),
         (1, 0, 3, 128, 64, 4, 3), (1, 0, 0, 128, 64, 4, 4), (1, 0, 0, 128, 128, 4, 3),
         (1, 384, 2, 128, 128, 4, 3), (1, 0, 2, 64, 128, 4, 4)),
    32: ((1, 0, 2, 128, 64, 4, 5), (1, 0, 1, 128, 128, 4, 5), (1, 0, 3, 128, 64, 4, 3),
         (1, 0, 0, 128, 64, 4, 4), (1, 0, 0, 128, 64, 4, 5), (1, 384, 2, 128, 64, 4, 5),
         (1, 0, 2, 64, 128, 4, 4)),
    64: ((1, 0, 2, 128, 64, 4, 4), (1, 0, 0, 128, 64, 4, 4), (0, 0, 2, 128, 64, 4, 4),
         (0, 0, 0, 128, 64, 4, 4), (0, 0, 1, 256, 64, 8, 4)),
    128: ((0, 0, 0, 256, 64, 8, 4), (0, 0, 1, 256, 64, 8, 3), (0, 0, 1, 256, 64, 8, 4),
          (0, 0, 0, 128, 64, 4, 3), (0, 0, 2, 128, 64, 4, 3)),
}  # fmt: skip
# both products at once
PAIRED = {
    16: (((1, 0, 2, 64, 128, 4, 3), (1, 0, 2, 128, 128, 4, 3)),
         ((1, 512, 2, 64, 128, 4, 3), (1, 384, 2, 128, 128, 4, 3)),
         ((1, 0, 0, 64, 64, 4, 4), (1, 0, 0, 128, 64, 4, 4))),
    32: (((1, 0, 2, 64, 64, 4, 5), (1, 0, 2, 128, 64, 4, 5)),
         ((1, 512, 2, 64, 64, 4, 5), (1, 384, 2, 128, 64, 4, 5)),
         ((1, 0, 0, 64, 64, 4, 4), (1, 0, 0, 128, 64, 4, 4))),
    64: (((1, 0, 2, 64, 64, 4, 4), (1, 0, 2, 128, 64, 4, 4)),
         ((0, 0, 1, 128, 64, 4, 4), (0, 0, 2, 128, 64, 4, 4))),
    128: (((0, 0, 1, 128, 64, 8, 4), (0, 0, 2, 128, 64, 4, 3)),
          ((0, 0, 1, 128, 64, 8, 4), (0, 0, 1, 256, 64, 8, 3)),
          ((0, 0, 1, 128, 64, 8, 3), (0, 0, 2, 128, 64, 4, 3)),
          ((0, 0, 1, 128, 64, 8, 3), (0, 0, 1, 256, 64, 8, 3)),
          ((0, 0, 0, 128, 64, 8, 4), (0, 0, 2, 128, 64, 4, 3)),
          ((0, 0, 2, 64, 64, 4, 3), (0, 0, 2, 128, 64, 4, 3))),
}  # fmt: skip
# both without copied tiles, where those are in use
UNTILED = {64: ((128, 64, 4, 4), (128, 64, 4, 3)), 128: ((128, 64, 8, 4), (128, 64, 8, 3))}
# tokens -> the height whose options are all tried; others where both products are tiled
WHOLLY = {128: 16, 256: 32, 512: 64, 8192: 128}
BOTH = ((32, 16), (64, 16), (256, 16), (256, 64), (512, 32), (512, 128), (1024, 64), (1024, 128),
        (2048, 128), (4096, 128))  # fmt: skip
PARTS = ("sort", "gate_up", "down", "sum")
SORT = options(("BLOCK", "num_warps"), (512, 4), (1024, 4), (1024, 8), (2048, 8), (2048, 16),
               (4096, 16))  # fmt: skip
SUM = options(("BLOCK", "num_warps"), (512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8))


def tiled_trials() -> Iterator[Trial]:
    def both(tokens: int, height: int) -> Iterator[Trial]:
        made = [
            options(("TILED", *TILED), *((True, *one) for one in pair)) for pair in PAIRED[height]
        ]
        if height in UNTILED:
            plain = ((False, *one) for one in UNTILED[height])
            made.insert(0, options(("TILED", *PRODUCT), *plain))
        for pair in made:
            names = (f"experts_{kernel} {height}" for kernel in ("gate_up", "down"))
            yield Trial("tiled", (tokens,), dict(zip(names, pair, strict=True)), str(height))

    for tokens in sorted({*WHOLLY, *(tokens for tokens, _ in BOTH)}):
        heights = [height for other, height in BOTH if other == tokens]
        if tokens in WHOLLY:
            heights.insert(0, WHOLLY[tokens])
        for height in heights:
            yield Trial("tiled", (tokens,), way=str(height))
            yield from both(tokens, height)
        if tokens not in WHOLLY:
            continue
        height = WHOLLY[tokens]
        for kernel, table in (("gate_up", TILED_GATE_UP), ("down", TILED_DOWN)):
            for change in options(("TILED", *TILED), *((True, *one) for one in table[height])):
                changes = {f"experts_{kernel} {height}": change}
                yield Trial("tiled", (tokens,), changes, str(height))


def parts_trials() -> Iterator[Trial]:
    for tokens, part in product((128, 256, 512, 2048, 8192), PARTS):
        yield Trial("parts", (tokens, part))
        for change in {"sort": SORT, "sum": SUM}.get(part, ()):
            yield Trial("parts", (tokens, part), {f"experts_{part}": change})


def parts_calls(runtime: Any, trial: Trial, copies: int) -> list[Call]:
    """One kernel of a layer."""
    (shape,) = EXPERTS.values()
    tokens, part = trial.load
    query = ExpertsQuery(*shape, "bfloat16")
    op = TritonExperts(query, Changed(runtime, trial.changes))
    x, chosen = experts_inputs(tokens)
    rows, pairs = tile_rows(query, tokens), tokens * shape[1]
    most = most_tiles(query, pairs, rows)
    h = torch.zeros(pairs, shape[3], dtype=x.dtype, device=DEVICE)
    y = torch.zeros(pairs, shape[2], dtype=x.dtype, device=DEVICE)
    calls: list[Call] = []
    for (weights, ids), packed in zip(chosen, experts_weights(copies), strict=False):
        order, tiles = op._sorted(ids, pairs, rows, most)
        work = Work(x, ids, order, tiles, most, h, y)

        def call(ids: Any = ids, weights: Any = weights, work: Any = work, packed: Any = packed):  # type: ignore[no-untyped-def]
            out = torch.empty_like(x)
            if part == "sort":
                op._sorted(ids, pairs, rows, most)
            elif part == "sum":
                op._sum((tokens, op._sum_blocks, 1), y, weights, out, shape[2])
            else:
                op._products[rows][part == "down"](work, packed[part == "down"])
            return x

        calls.append(call)
    return calls


def parts_limit(load: tuple[Any, ...]) -> float:
    """The products' bytes or operations, whichever take longer."""
    share = {"gate_up": 2 / 3, "down": 1 / 3}.get(load[1], 0.0)
    return share * experts_limit(load[:1])


SECTIONS = {
    "experts": (experts_trials, experts_calls, experts_limit),
    "tiled": (tiled_trials, experts_calls, experts_limit),
    "parts": (parts_trials, parts_calls, parts_limit),
}
