"""Which launch options of the kernels are fastest on this device, for the shapes of one model.

`subjects` makes them from the model's selection queries, `tune` times each one's candidates: those that differ least
from the options in use first, within a share of the time that is given. Options win when they are faster by MARGIN,
twice, and give what the options in use give.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Protocol

import numpy as np
import torch

from headrace.platforms import tuned
from headrace.platforms.batch import HostArgs
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.graph import GraphKey
from headrace.platforms.queries import AttentionQuery, ExpertsQuery, LinearQuery
from headrace.platforms.reference.cases import Requests, make_batch, make_caches, scattered_blocks
from headrace.platforms.triton import experts
from headrace.platforms.triton.attention import TritonAttention
from headrace.platforms.triton.experts import TritonExperts
from headrace.platforms.triton.linear import TritonLinear

Values = Mapping[str, int]
Call = Callable[[], Any]

MARGIN = 0.03  # of the time in use
# Of the largest result: two roundings to bfloat16 and sums in another order.
ALIKE = 0.02
# Bytes of weights or caches that one measurement reads: more than any cache of a device holds.
READ_BYTES = 512 << 20
MOST_COPIES = 64
CALLS, REPLAYS, ROUNDS = 64, 5, 3

_WARPS, _STAGES = (2, 4, 8), (2, 3, 4)
_ROW = {"BLOCK_N": (1, 2, 4, 8), "BLOCK_K": (256, 512, 1024, 2048, 4096), "num_warps": _WARPS}
_PRODUCT = {"BLOCK_K": (64, 128), "num_warps": (4, 8), "num_stages": _STAGES}
SPACES: Mapping[str, Mapping[str, Sequence[int]]] = {
    "row": _ROW,
    "gated_row": _ROW,
    "few_rows": {
        "BLOCK_N": (32, 64, 128),
        "BLOCK_K": (64, 128),
        "SPLITS": (1, 2, 4, 8),
        "num_warps": (4, 8),
        "num_stages": (3, 4),
    },
    "experts_gate_up": {"BLOCK_N": (32, 64, 128), **_PRODUCT},
    "experts_down": {"BLOCK_N": (64, 128, 256), **_PRODUCT},
    "experts_gate_up_row": _ROW,
    "experts_down_row": {**_ROW, "BLOCK_K": (128, 256, 512)},
    "decode": {"BLOCK_N": (16, 32, 64, 128), "num_warps": _WARPS, "num_stages": _STAGES},
    "prefill": {
        "BLOCK_M": (64, 128),
        "BLOCK_N": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": _STAGES,
    },
}
# requests, keys and new tokens of each
DECODES, PREFILL = ((1, 8192, 1), (32, 1024, 1)), (1, 2048, 2048)
BLOCK = 32
MOST_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel at a shape. `make(runtime, operands)` binds the op with the runtime's launch options and returns calls
    that read other memory each; they are timed together."""

    kernel: str
    shape: str
    load: str
    key: str
    current: Values
    candidates: Sequence[Values]
    operands: Callable[[], Any]
    make: Callable[[Any, Any], list[Call]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of a call with the options in use and with the best ones; `options` is empty where none are better."""

    subject: Subject
    now: float = 0.0
    best: float = 0.0
    options: Values | None = None
    tried: int = 0
    note: str = ""


class Timer(Protocol):
    def __call__(self, calls: Sequence[Call]) -> tuple[float, torch.Tensor | None]:
        """Seconds of one call, and the first call's result."""


class GraphTimer:
    """Calls that a graph replays one after the other: without the host's time for them."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime, self._stream = runtime, runtime.stream()

    def __call__(self, calls: Sequence[Call]) -> tuple[float, torch.Tensor | None]:
        runtime = self._runtime
        runtime.synchronize()  # the operands were made on another stream
        repeats = -(-CALLS // len(calls))

        def body() -> None:
            for _ in range(repeats):
                for call in calls:
                    call()

        with torch.inference_mode(), runtime.use_stream(self._stream):
            result = calls[0]()
            calls[-1]()
            runtime.synchronize()
            none = np.zeros(0, np.int32)
            host = HostArgs(none, none)
            graph = runtime.graphs().capture(GraphKey("tune", 0, 0), body, host)
            times = []
            for count in (1, *(REPLAYS,) * ROUNDS):  # the first one warms up
                runtime.synchronize()
                began = time.perf_counter()
                for _ in range(count):
                    graph.replay(host)
                runtime.synchronize()
                times.append((time.perf_counter() - began) / count)
            graph.release()
        return min(times[1:]) / (repeats * len(calls)), result


class _Runtime:
    """A runtime with other measured options, which notes what is asked for."""

    def __init__(self, runtime: DeviceRuntime, measured: tuned.Options) -> None:
        self._runtime, self.tuned = runtime, measured
        self.asked: list[tuple[str, Any, Mapping[str, Any], Mapping[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def kernel_options(
        self, kernel: str, query: Any, options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        own = self._runtime.kernel_options(kernel, query, options)
        self.asked.append((kernel, query, options, {**options, **own}))
        return own


def subjects(queries: Iterable[tuple[str, Any]], runtime: DeviceRuntime) -> list[Subject]:
    """Of the (op, query) pairs that these kernels serve. Those that read most come first."""
    queries = list(dict.fromkeys(queries))
    halves = {query.intermediate for op, query in queries if op.endswith("_and_mul")}
    made: list[Subject] = []
    for op, query in queries:
        if op == "linear":
            made += _linears(query, runtime, query.out_features / 2 in halves)
        elif op == "fused_experts":
            made += _experts(query, runtime)
        elif op == "paged_attention" and not query.latent:
            made += _attentions(query, runtime)
    return list({subject.key: subject for subject in made}.values())


def tune(
    asked: Sequence[Subject],
    runtime: DeviceRuntime,
    timer: Timer,
    seconds: float,
    progress: Callable[[Subject, int], None] = lambda subject, tried: None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """An outcome for each subject, in order, about `seconds` after the call at the latest. What a subject does not use
    of its share is left to those behind it."""
    deadline = clock() + seconds
    for index, subject in enumerate(asked):
        left = deadline - clock()
        if left <= 0:
            yield Outcome(subject, note="no time left")
            continue
        end = clock() + left / (len(asked) - index)

        def tell(tried: int, subject: Subject = subject) -> None:
            progress(subject, tried)

        try:
            yield _tuned(subject, runtime, timer, lambda end=end: clock() < end, tell)  # type: ignore[misc]
        except (RuntimeError, MemoryError) as error:
            yield Outcome(subject, note=f"not measured: {str(error).splitlines()[0]}")


def _tuned(
    subject: Subject,
    runtime: DeviceRuntime,
    timer: Timer,
    in_time: Callable[[], bool],
    progress: Callable[[int], None],
) -> Outcome:
    operands = subject.operands()

    def measure(options: Values) -> tuple[float, torch.Tensor | None]:
        changed = _Runtime(runtime, {subject.key: options})
        return timer(subject.make(changed, operands))

    now, expected = measure(subject.current)
    best, options, tried = now, subject.current, 0
    for candidate in _nearest_first(subject):
        if not in_time():
            break
        tried += 1
        try:
            took, result = measure(candidate)
        except Exception:  # too much shared memory, too many registers: it is not the best one then
            took, result = float("inf"), expected
        if took < best and _alike(result, expected):
            best, options = took, candidate
        progress(tried)
    if options is not subject.current:  # once more, side by side: the fastest of many is lucky too
        now, best = measure(subject.current)[0], measure(options)[0]
    won = best <= now * (1 - MARGIN)
    return Outcome(subject, now, best if won else now, options if won else {}, tried)


def _nearest_first(subject: Subject) -> list[Values]:
    """By how many options differ from those in use; in rows, before two of them are changed, one is."""

    def distance(candidate: Values) -> int:
        return sum(value != subject.current.get(name) for name, value in candidate.items())

    return sorted(filter(distance, subject.candidates), key=distance)


def _alike(result: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if result is None or expected is None:
        return result is expected
    difference = (result.float() - expected.float()).abs().max()
    return bool(difference <= ALIKE * expected.float().abs().max())  # False where it is NaN


def _found(
    op: Any, query: Any, runtime: DeviceRuntime, kernels: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Kernel, key, options in use and candidates, as Subject has them, of what the op asks for when it is made."""
    watched = _Runtime(runtime, runtime.tuned)
    op(query, watched)
    for kernel, asked, given, wanted in watched.asked:
        if kernel not in kernels or kernel not in SPACES:
            continue
        key = tuned.key(kernel, asked, given)
        current = {**wanted, **runtime.tuned.get(key, {})}
        space = {name: values for name, values in SPACES[kernel].items() if name in current}
        candidates = [dict(zip(space, values, strict=True)) for values in product(*space.values())]
        used = {name: current[name] for name in space}
        yield {"kernel": kernel, "key": key, "current": used, "candidates": candidates}


def _copies(nbytes: int) -> int:
    return max(2, min(MOST_COPIES, READ_BYTES // nbytes))


def _linears(query: LinearQuery, runtime: DeviceRuntime, gated: bool) -> Iterator[Subject]:
    """With one row, as a step of one request has it, and with few, where the library may be faster."""
    dtype, device = getattr(torch, query.dtype), runtime.device
    shape = (query.out_features, query.in_features)

    def operands(rows: int) -> Any:
        count = _copies(shape[0] * shape[1] * dtype.itemsize)
        weights = [torch.randn(shape, dtype=dtype, device=device) for _ in range(count)]
        bias = torch.randn(shape[0], dtype=dtype, device=device) if query.bias else None
        return torch.randn(rows, shape[1], dtype=dtype, device=device), weights, bias

    def rows(changed: Any, operands: Any) -> list[Call]:
        (x, weights, bias), op = operands, TritonLinear(query, changed)
        return [partial(op, x, (w, bias)) for w in weights]

    def gated_rows(changed: Any, operands: Any) -> list[Call]:
        (x, weights, bias), op = operands, TritonLinear(query, changed)
        return [partial(op.gated, x, (w, bias), "silu") for w in weights]

    name = "gated_row" if gated else "row"
    make, text = gated_rows if gated else rows, f"{shape[1]} -> {shape[0]}"
    for found in _found(TritonLinear, query, runtime, (name,)):
        drawn = partial(operands, 1)
        yield Subject(shape=text, load="1 token", operands=drawn, make=make, **found)
    for found in _found(TritonLinear, query, runtime, ("few_rows",)):
        count = int(found["key"].rpartition("BLOCK_M=")[2])
        drawn = partial(operands, count)
        yield Subject(shape=text, load=f"{count} tokens", operands=drawn, make=rows, **found)


def _experts(query: ExpertsQuery, runtime: DeviceRuntime) -> Iterator[Subject]:
    """With one token, and with as many as fill tiles of each height."""
    dtype, device = getattr(torch, query.dtype), runtime.device
    hidden, size = query.hidden, query.intermediate

    def operands(tokens: int) -> Any:
        w13 = torch.empty(query.experts, 2 * size, hidden, dtype=dtype, device=device)
        w2 = torch.empty(query.experts, hidden, size, dtype=dtype, device=device)
        packed = w13.normal_(std=hidden**-0.5), w2.normal_(std=size**-0.5)
        x = torch.randn(tokens, hidden, dtype=dtype, device=device)
        chosen = []
        for _ in range(8):
            logits, ids = torch.randn(tokens, query.experts, device=device).topk(query.top_k)
            chosen.append((logits.softmax(1), ids.int()))
        return x, chosen, packed

    def make(changed: Any, operands: Any) -> list[Call]:
        x, chosen, packed = operands
        op: Any = TritonExperts(query, changed)
        return [partial(op, x, *c, packed) for c in chosen]

    shape = f"{query.top_k} of {query.experts}, {hidden} x {size}"
    names = ("experts_gate_up_row", "experts_down_row")
    one = partial(operands, 1)
    for found in _found(TritonExperts, query, runtime, names):
        yield Subject(shape=shape, load="1 token", operands=one, make=make, **found)
    for found in _found(TritonExperts, query, runtime, ("experts_gate_up", "experts_down")):
        rows = int(found["key"].rpartition("BLOCK_M=")[2])
        tokens = max(2, min(MOST_TOKENS, experts.most_tokens(query, rows)))
        if experts.tile_rows(query, tokens) == rows:
            drawn = partial(operands, tokens)
            load = f"{tokens} tokens"
            yield Subject(shape=shape, load=load, operands=drawn, make=make, **found)


def _attentions(query: AttentionQuery, runtime: DeviceRuntime) -> Iterator[Subject]:
    def operands(loads: Sequence[tuple[int, int, int]]) -> Any:
        probe = TritonAttention(query, runtime)
        dtype, device = getattr(torch, query.dtype), runtime.device
        made = []
        for requests, keys, new in loads:
            batch = Requests(((keys, new),) * requests)
            table = scattered_blocks(batch, BLOCK, 0)
            nbytes = 2 * requests * keys * query.kv_heads * query.head_dim * dtype.itemsize
            pairs = [
                make_caches(probe, BLOCK, 1 + int(table.max()), device)
                for _ in range(min(8, _copies(nbytes)))
            ]
            for cache in (cache for pair in pairs for cache in pair):
                if cache.is_floating_point() and cache.element_size() > 1:
                    cache.normal_()
            heads = (requests * new, query.q_heads, query.head_dim)
            q = torch.randn(heads, dtype=dtype, device=device)
            made.append((q, pairs, make_batch(batch, table, BLOCK, device)))
        return made

    def make(changed: Any, operands: Any) -> list[Call]:
        op: Any = TritonAttention(query, changed)
        calls: list[Call] = []
        for q, pairs, batch in operands:
            plan = op.plan(batch, 0)
            calls += [partial(op.attend, q, *pair, plan) for pair in pairs]
        return calls

    shape = f"{query.q_heads}/{query.kv_heads} x {query.head_dim}"
    shape += f", window {query.window}" if query.window else ""
    for kernel, loads in (("decode", DECODES), ("prefill", (PREFILL,))):
        text = ", ".join(f"{count} x {keys:,}" for count, keys, _ in loads)
        for found in _found(TritonAttention, query, runtime, (kernel,)):
            drawn = partial(operands, loads)
            yield Subject(shape=shape, load=text, operands=drawn, make=make, **found)
