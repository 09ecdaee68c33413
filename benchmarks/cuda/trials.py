"""Launch options and ways of dividing work that might be faster, each one timed: what a run of this decides is written
into the tables of platforms/triton and platforms/cuda.

    python -m benchmarks.cuda.trials [--only chain,head,experts,tiled,parts,few,decode,prefill] [--json FILE]

Workers compile first, side by side, into Triton's cache; then one process times everything. Prints the best of each
load beside what is in use. Results that differ from those of the options in use are marked "wrong".
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.cuda import trials_attention, trials_experts
from benchmarks.cuda.layers import LAYERS, Layers, widen
from benchmarks.cuda.trial import COPIES, PRODUCT, READ, ROW, Call, Changed, Trial, options
from benchmarks.cuda.trials_experts import ROW_DOWN, ROW_GATE_UP
from headrace.platforms.queries import AttentionQuery, LinearQuery
from headrace.platforms.reference.cases import Requests, make_batch, make_caches, scattered_blocks
from headrace.platforms.triton import attention
from headrace.platforms.triton.attention import TritonAttention
from headrace.platforms.triton.linear import TritonLinear

FEW = (*PRODUCT, "SPLITS")
COPIES_LAYERS = 6
# Results of a load that are printed, where they are more than four.
SHOWN = {"tiled": 40, "parts": 40, "prefill": 20}
# in, out of products; the rows of x to try
PRODUCTS = {
    "8B qkv": (4096, 6144, (16, 32, 64, 128)),
    "8B o": (4096, 4096, (16, 32, 64, 128)),
    "8B gate_up": (4096, 28672, (16, 32, 64, 128)),
    "8B down": (14336, 4096, (16, 32, 64, 128)),
    "30B qkv": (2048, 5120, (32, 128)),
    "30B o": (4096, 2048, (32, 128)),
    "30B router": (2048, 128, (32, 128)),
}
# KV heads for 32 query heads, requests, keys of each
LOADS = ((1, 600), (32, 1100), (128, 1200), (256, 300))
DECODES = tuple((kv, *load) for kv in (8, 4) for load in LOADS)


def opened() -> Any:
    from headrace.platforms.cuda.platform import CudaPlatform

    platform = CudaPlatform()
    return platform.open(platform.probe()[0])


# -- products of few rows ---------------------------------------------------------------------------------------------

FEW_ROWS = {
    16: ((64, 128, 4, 4), (32, 128, 4, 4), (128, 64, 4, 4), (32, 256, 4, 3)),
    32: ((64, 128, 4, 4), (32, 128, 4, 4), (128, 64, 4, 4), (64, 64, 4, 5)),
    64: ((64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4)),
    128: ((64, 64, 4, 4), (128, 64, 8, 4), (64, 128, 8, 3), (128, 64, 4, 3)),
}


def few_trials() -> Iterator[Trial]:
    for name, (width, out, heights) in PRODUCTS.items():
        for rows in heights:
            yield Trial("few", (name, rows), way="library")
            for base in FEW_ROWS[rows]:
                blocks = -(-out // base[0])
                # programs for two and for four of each of 132 units
                splits = {max(1, min(8, width // 512, round(many / blocks))) for many in (264, 528)}
                for split in sorted(splits):
                    change = options(FEW, (*base, split))[0]
                    yield Trial("few", (name, rows), {f"few_rows {rows}": change})


@cache
def few_weights(name: str, copies: int) -> list[torch.Tensor]:
    width, out, _ = PRODUCTS[name]
    count = min(copies, max(2, (1 << 29) // (2 * width * out)))
    like = {"device": DEVICE, "dtype": torch.bfloat16}
    return [torch.randn(out, width, **like).mul_(width**-0.5) for _ in range(count)]


@cache
def few_input(name: str, rows: int) -> torch.Tensor:
    torch.manual_seed(rows)
    return torch.randn(rows, PRODUCTS[name][0], device=DEVICE, dtype=torch.bfloat16)


def few_calls(runtime: Any, trial: Trial, copies: int) -> list[Call]:
    name, rows = trial.load
    x = few_input(name, rows)
    weights = few_weights(name, 1 if copies == 1 else 16)
    if trial.way == "library":
        return [lambda w=w: F.linear(x, w) for w in weights]  # type: ignore[misc]
    query = LinearQuery(*PRODUCTS[name][:2], "bfloat16")
    op = TritonLinear(query, Changed(runtime, trial.changes))
    return [lambda w=w: op(x, (w, None)) for w in weights]  # type: ignore[misc]


def few_limit(load: tuple[Any, ...]) -> float:
    width, out, _ = PRODUCTS[load[0]]
    return 2 * width * out / READ


# -- decode attention -------------------------------------------------------------------------------------------------

DECODE = options(
    ("BLOCK_N", "num_warps", "num_stages"), (64, 2, 3), (64, 1, 3), (64, 2, 2), (64, 4, 3),
    (32, 1, 3), (32, 1, 4), (32, 2, 4), (32, 1, 2), (128, 4, 2), (128, 4, 3), (128, 2, 2), (64, 4, 4),
)  # fmt: skip
DECODE += options(
    ("BLOCK_N", "num_warps", "num_stages", "AHEAD"), (32, 1, 3, 1), (16, 1, 4, 1), (32, 1, 4, 1),
    (64, 2, 3, 1), (64, 2, 4, 1), (128, 4, 3, 1), (64, 4, 4, 1),
)  # fmt: skip


def decode_trials() -> Iterator[Trial]:
    for load in DECODES:
        for programs in ("4", "8", "2"):
            yield Trial("decode", load, way=f"{programs} programs a unit")
        yield from (Trial("decode", load, {"decode": change}) for change in DECODE)


@cache
def decode_inputs(kv_heads: int, requests: int, keys: int, copies: int) -> Any:
    query = AttentionQuery(32, kv_heads, 128, 128, "bfloat16", "bfloat16", 128**-0.5)
    probe = TritonAttention(query, Changed(RUNTIME, {}))
    batch = Requests(((keys, 1),) * requests)
    table = scattered_blocks(batch, 32, 0)
    nbytes = 512 * kv_heads * requests * keys
    count = min(copies, max(2, (1 << 30) // nbytes))
    caches = [make_caches(probe, 32, 1 + int(table.max()), DEVICE) for _ in range(count)]
    for pair in caches:
        for one in pair:
            one.normal_()
    q = torch.randn(requests, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    made = make_batch(batch, table, 32, DEVICE)
    widen(made)
    return query, q, caches, made


def decode_calls(runtime: Any, trial: Trial, copies: int) -> list[Call]:
    query, q, caches, batch = decode_inputs(*trial.load, 1 if copies == 1 else 8)
    before = attention.PROGRAMS_A_UNIT
    attention.PROGRAMS_A_UNIT = int(trial.way.split()[0]) if trial.way else before
    try:
        op = TritonAttention(query, Changed(runtime, trial.changes))
        plan = op.plan(batch, 0)
    finally:
        attention.PROGRAMS_A_UNIT = before
    return [lambda c=c: op.attend(q, *c, plan) for c in caches]  # type: ignore[misc]


def decode_limit(load: tuple[Any, ...]) -> float:
    kv_heads, requests, keys = load
    return float(512 * kv_heads * requests * keys / READ)


# -- layers of one stream ---------------------------------------------------------------------------------------------

# by the columns of the matrix
ROWS = {
    2048: ((4, 2048, 4), (2, 2048, 4), (4, 2048, 8), (8, 2048, 8), (2, 2048, 2), (1, 2048, 4),
           (8, 2048, 4), (2, 1024, 2)),
    4096: ((2, 4096, 8), (1, 4096, 4), (2, 4096, 4), (4, 4096, 8), (1, 4096, 8), (4, 4096, 16),
           (2, 1024, 2), (2, 2048, 4)),
    14336: ((4, 512, 4), (1, 16384, 8), (1, 16384, 16), (2, 16384, 16), (2, 2048, 8), (4, 1024, 4),
            (2, 1024, 4), (2, 2048, 4)),
}  # fmt: skip
GATED = ((1, 4096, 8), (1, 4096, 4), (2, 4096, 8), (2, 4096, 16), (1, 1024, 2), (1, 2048, 4))


def chain_space(model: str) -> dict[str, list[dict[str, int]]]:
    """By kernel and shape, what may be tried for it."""
    space = {}
    for width, out, gated in LAYERS[model].products():
        kernel, table = ("gated_row", GATED) if gated else ("row", ROWS[width])
        space[f"{kernel} {width}x{out}"] = options(ROW, *table)
    if LAYERS[model].experts:
        space |= {"experts_gate_up_row": ROW_GATE_UP, "experts_down_row": ROW_DOWN}
    return space


def chain_trials() -> Iterator[Trial]:
    for model in LAYERS:
        for way in ("", "all norms", "none norms", "rotary apart", "no dependent launches"):
            yield Trial("chain", (model,), way=way)
        for kernel, changes in chain_space(model).items():
            yield from (Trial("chain", (model,), {kernel: change}) for change in changes)


@cache
def layers(model: str, copies: int) -> Layers:
    return Layers(LAYERS[model], RUNTIME, copies)


def chain_calls(runtime: Any, trial: Trial, copies: int) -> list[Call]:
    made = layers(trial.load[0], 1 if copies == 1 else COPIES_LAYERS)
    pdl = trial.way != "no dependent launches"
    ops = made.ops(Changed(runtime, trial.changes, pdl))
    norms = trial.way.removesuffix(" norms") if trial.way.endswith(" norms") else ""
    return [lambda: made.run(ops, norms, trial.way != "rotary apart")]


def chain_limit(load: tuple[Any, ...]) -> float:
    return LAYERS[load[0]].bytes() / READ


# -- the head of one stream -------------------------------------------------------------------------------------------

HEADS = {"8B head": (4096, 128256), "30B head": (2048, 151936)}


def head_trials() -> Iterator[Trial]:
    for name, (width, _) in HEADS.items():
        for change in options(ROW, *ROWS[width]):
            yield Trial("head", (name,), {"row": change})


@cache
def head_weights(name: str, copies: int) -> list[torch.Tensor]:
    width, out = HEADS[name]
    return [torch.randn(out, width, device=DEVICE).bfloat16() for _ in range(min(copies, 2))]


def head_calls(runtime: Any, trial: Trial, copies: int) -> list[Call]:
    weights = head_weights(trial.load[0], copies)
    query = LinearQuery(*HEADS[trial.load[0]], "bfloat16", out_dtype="float32")
    op = TritonLinear(query, Changed(runtime, trial.changes))
    x = torch.ones(1, query.in_features, device=DEVICE, dtype=torch.bfloat16)
    return [lambda w=w: op(x, (w, None)) for w in weights]  # type: ignore[misc]


def head_limit(load: tuple[Any, ...]) -> float:
    width, out = HEADS[load[0]]
    return 2 * width * out / READ


# -- all --------------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, tuple[Callable[[], Iterator[Trial]], Callable[..., list[Call]], Any]] = {
    "chain": (chain_trials, chain_calls, chain_limit),
    "head": (head_trials, head_calls, head_limit),
    **trials_experts.SECTIONS,
    "few": (few_trials, few_calls, few_limit),
    "decode": (decode_trials, decode_calls, decode_limit),
    **trials_attention.SECTIONS,
}
RUNTIME: Any = None
DEVICE: Any = None
BROKEN = False
PATIENCE = 60  # seconds to wait for the next trial to be compiled


def start() -> None:
    global RUNTIME, DEVICE
    RUNTIME = opened()
    DEVICE = RUNTIME.device


def named(trial: Trial) -> tuple[Any, ...]:
    return trial.section, trial.load, trial.label


def compiled(trial: Trial) -> tuple[tuple[Any, ...], str]:
    """In a worker: everything a trial launches, once -> (its name, what went wrong). A device that a trial has broken
    answers this process no more: what comes after it is left to the timing."""
    global BROKEN
    try:
        if not BROKEN:
            with torch.inference_mode():
                SECTIONS[trial.section][1](RUNTIME, trial, 1)[0]()
                RUNTIME.synchronize()
        return named(trial), ""
    except Exception as error:
        try:
            RUNTIME.synchronize()
        except RuntimeError:
            BROKEN = True
        return named(trial), f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"


def compile_all(trials: list[Trial], workers: int) -> dict[tuple[Any, ...], str]:
    """What is wrong with the trials that cannot be timed, by their names: failed, or hanging for PATIENCE."""
    wrong = {named(trial): "no answer" for trial in trials}
    with multiprocessing.get_context("spawn").Pool(workers, start) as pool:
        answers = pool.imap_unordered(compiled, trials)
        try:
            for _ in trials:
                name, said = answers.next(timeout=PATIENCE)
                wrong[name] = said
        except multiprocessing.TimeoutError:
            pass  # leaving the pool ends its processes
    return {name: said for name, said in wrong.items() if said}


def timed(trial: Trial, expected: dict[Any, torch.Tensor]) -> tuple[float, str]:
    """Microseconds of a call, and what is wrong with it."""
    from benchmarks.cuda.kernels import replayed

    try:
        calls = SECTIONS[trial.section][1](RUNTIME, trial, COPIES)
        result = calls[0]()
        RUNTIME.synchronize()
        each = len(calls) * (1 if len(result) > 1024 else 4)
        took = replayed((calls * 4)[:each], 5) / (COPIES_LAYERS if trial.section == "chain" else 1)
    except Exception as error:
        return float("inf"), f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    want = expected.setdefault((trial.section, trial.load), result)
    off = (result.float() - want.float()).norm() / want.float().norm()
    # rounding elsewhere may choose other experts in one of the layers
    most = 0.3 if trial.section == "chain" else 0.02
    return took, "" if off < most else f"wrong: off by {off:.3f}"


def descend(model: str, expected: dict[Any, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """The options of one kernel after the other, each with the best of those before it."""
    best: dict[str, Any] = {}
    now = timed(Trial("chain", (model,)), expected)[0]
    for kernel, changes in chain_space(model).items():
        results = []
        for change in changes:
            took, wrong = timed(Trial("chain", (model,), {**best, kernel: change}), expected)
            results.append((took, Trial("chain", (model,), {kernel: change}).label, wrong, change))
        results.sort(key=lambda one: one[0])
        if results[0][0] < now and not results[0][2]:
            now, best[kernel] = results[0][0], results[0][3]
        yield {"load": f"{model} {kernel}", "us": now, "best": [one[:3] for one in results]}
    yield {"load": f"{model} all", "us": now, "best": [], "changes": best}


def results(only: set[str], wrong: Mapping[tuple[Any, ...], str]) -> Iterator[dict[str, Any]]:
    """`wrong`: trials that are left out, and why."""
    expected: dict[Any, torch.Tensor] = {}
    for section in (name for name in SECTIONS if name in only):
        trials, _, limit = SECTIONS[section]
        rows: dict[Any, list[Any]] = {}
        for trial in trials():
            if section == "chain" and trial.changes:
                continue
            bad = wrong.get(named(trial))
            outcome = (float("inf"), bad) if bad else timed(trial, expected)
            rows.setdefault(trial.load, []).append((*outcome, trial))
        for load, found in rows.items():
            first = found[0]
            order = sorted(found, key=lambda one: one[0])
            row = {
                "section": section,
                "load": " ".join(map(str, load)),
                "us": first[0],
                "limit": 1e6 * limit(load),
                "best": [(took, trial.label, wrong) for took, wrong, trial in order],
            }
            if section == "prefill":
                row["operations"] = trials_attention.operations(load)
            yield row
        if section == "chain":
            for model in LAYERS:
                yield from ({"section": section, **row} for row in descend(model, expected))
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--json", default="")
    parser.add_argument("--workers", type=int, default=14)
    asked = parser.parse_args()
    only = set(asked.only.split(","))
    began = time.perf_counter()
    trials = [trial for name in SECTIONS if name in only for trial in SECTIONS[name][0]()]
    wrong = compile_all(trials, asked.workers)
    passed = time.perf_counter() - began
    print(f"{len(trials)} trials, {len(wrong)} failed; compiled after {passed:.0f} s", flush=True)
    start()
    found = []
    with torch.inference_mode():
        for row in results(only, wrong):
            found.append(row)
            best = "; ".join(
                f"{label} {took:.1f}{' ' + wrong if wrong else ''}"
                for took, label, wrong in row["best"][: SHOWN.get(row["section"], 4)]
            )
            limit = f"/{row['limit']:.1f}" if "limit" in row else ""
            if "operations" in row:
                limit += f", {row['operations'] / row['best'][0][0] / 1e6:.0f} TFLOP/s at best"
            print(f"{row['section']} {row['load']}: {row['us']:.1f}{limit} | {best}", flush=True)
    print(f"after {time.perf_counter() - began:.0f} s")
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
