"""Kernels against their limits: products of few rows beside the vendor's library, attention against its bytes, experts
against the weights that are chosen, fused kernels beside their parts, and what a launch costs the host.

    python -m benchmarks.cuda.kernels [--only linear,attention,latent,experts,fused,sampling,launches] [--json FILE]

Each figure is the time of one call among many that a graph replays back to back, over weights that together exceed
the cache many times, as the layers of a model do.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from headrace.platforms.attention import Turn
from headrace.platforms.cuda.platform import CudaPlatform
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import (
    ActivationQuery,
    AttentionQuery,
    ExpertsQuery,
    LinearQuery,
    NormQuery,
    RotaryQuery,
    RouterQuery,
    SampleQuery,
)
from headrace.platforms.reference.cases import Requests, make_batch, make_caches, scattered_blocks
from headrace.platforms.triton.activations import SiluAndMul
from headrace.platforms.triton.attention import TritonAttention
from headrace.platforms.triton.experts import TritonExperts
from headrace.platforms.triton.linear import TritonLinear
from headrace.platforms.triton.logprobs import Logprobs
from headrace.platforms.triton.mla import attention_of
from headrace.platforms.triton.norms import AddRmsNorm, RmsNorm
from headrace.platforms.triton.penalties import Penalties
from headrace.platforms.triton.rotary import Rotary
from headrace.platforms.triton.routing import TopkSoftmax
from headrace.platforms.triton.sampling import Sample

# in, out: Llama 3.1 8B, Llama 3.2 1B, Qwen3-30B-A3B
SHAPES = {
    "8B qkv": (4096, 6144),
    "8B o": (4096, 4096),
    "8B gate_up": (4096, 28672),
    "8B down": (14336, 4096),
    "8B head": (4096, 128256),
    "1B qkv": (2048, 3072),
    "1B gate_up": (2048, 16384),
    "1B down": (8192, 2048),
    "30B qkv": (2048, 5120),
    "30B o": (4096, 2048),
    "30B head": (2048, 151936),
}
# experts, of them for a token, hidden, intermediate
EXPERTS = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Qwen1.5-MoE-A2.7B": (60, 4, 2048, 1408),
    "Mixtral 8x7B": (8, 2, 4096, 14336),
}
CACHE_BYTES = 1 << 30
READ = 4.38e12  # bytes a second that an H200 reads
MULTIPLY = 790e12  # bfloat16 operations a second that it was seen to do


def replayed(calls: list[Callable[[], Any]], repeats: int = 5) -> float:
    """Microseconds of one of `calls`, replayed one after the other."""
    stream = torch.cuda.Stream()
    # what makes the operands is still running on the other one
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
        graph.replay()
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return 1e3 * min(times) / len(calls)


def linear(runtime: DeviceRuntime, name: str, rows: int) -> dict[str, Any]:
    width, out = SHAPES[name]
    nbytes = 2 * width * out
    count = max(4, min(64, CACHE_BYTES // nbytes))
    dtype = torch.bfloat16
    weights = [torch.randn(out, width, device="cuda", dtype=dtype) for _ in range(count)]
    x = torch.randn(rows, width, device="cuda", dtype=dtype)
    op = TritonLinear(LinearQuery(width, out, "bfloat16"), runtime)
    ours = replayed([lambda w=w: op(x, (w, None)) for w in weights])
    library = replayed([lambda w=w: F.linear(x, w) for w in weights])
    row = {"what": name, "rows": rows, "library_us": round(library, 2)}
    row["library_tb_s"] = round(nbytes / library / 1e6, 2)
    return row | {"ours_us": round(ours, 2), "ours_tb_s": round(nbytes / ours / 1e6, 2)}


def attention(
    runtime: DeviceRuntime, batch: int, length: int, new: int = 1, latent: int = 0
) -> dict[str, Any]:
    """Llama 3.1 8B's, or DeepSeek's over a latent cache with so many heads."""
    query = AttentionQuery(32, 8, 128, 128, "bfloat16", "bfloat16", 128**-0.5)
    if latent:
        query = AttentionQuery(latent, 1, 576, 512, "bfloat16", "bfloat16", 0.1, latent=True)
    op = attention_of(query, runtime)
    row = 2 * query.kv_heads * (query.head_dim + (0 if latent else query.v_head_dim))
    requests = Requests(((length, new),) * batch)
    table = scattered_blocks(requests, 32, 0)
    layers = max(2, min(16, (CACHE_BYTES * 2) // (row * batch * length)))
    caches = [make_caches(op, 32, 1 + int(table.max()), runtime.device) for _ in range(layers)]
    for pair in caches:
        for cache in pair:
            cache.normal_()
    heads, size, wide = query.q_heads, query.head_dim, query.v_head_dim
    q = torch.randn(batch * new, heads, size, device="cuda", dtype=torch.bfloat16)
    plan = op.plan(make_batch(requests, table, 32, runtime.device), 0)
    took = replayed([lambda c=pair: op.attend(q, *c, plan) for pair in caches])
    nbytes = row * batch * length
    pairs = batch * (new * (length - new) + new * (new + 1) / 2)
    flops = 2 * heads * (size + wide) * pairs
    kind = "decode" if new == 1 else "prefill"
    return {
        "what": f"{kind}, {latent} heads over a latent cache" if latent else kind,
        "batch": batch,
        "length": length,
        "splits": plan.splits,
        "us": round(took, 2),
        "tb_s": round(nbytes / took / 1e6, 2),
        "tflop_s": round(flops / took / 1e6, 1),
    }


def experts(runtime: DeviceRuntime, name: str, tokens: int) -> dict[str, Any]:
    """Route and compute; the limit is the bytes of the experts chosen, or the products."""
    count, top_k, hidden, size = EXPERTS[name]
    query = ExpertsQuery(count, top_k, hidden, size, "bfloat16")
    op, route = TritonExperts(query, runtime), TopkSoftmax(RouterQuery(count, top_k, True), runtime)
    layers = 4
    like = {"device": "cuda", "dtype": torch.bfloat16}
    packed = [
        op.pack(
            torch.randn(count, 2 * size, hidden, **like).mul_(hidden**-0.5),
            torch.randn(count, hidden, size, **like).mul_(size**-0.5),
        )
        for _ in range(layers)
    ]
    x = torch.randn(tokens, hidden, **like)
    chosen = [route(torch.randn(tokens, count, device="cuda"), top_k, True) for _ in packed]
    took = replayed(
        [lambda c=c, p=p: op(x, *c, p) for c, p in zip(chosen, packed, strict=True)] * 4
    )
    logits = torch.randn(tokens, count, device="cuda")
    routed = replayed([lambda: route(logits, top_k, True)] * 16)
    used = sum(len(ids.unique()) for _, ids in chosen) / layers
    reading = used * 3 * size * hidden * 2 / READ
    computing = 6 * tokens * top_k * size * hidden / MULTIPLY
    row = {"what": f"experts of {name}", "tokens": tokens, "experts": round(used, 1)}
    limit = 1e6 * max(reading, computing)
    row |= {"us": round(took, 2), "limit_us": round(limit, 2), "of_limit": round(limit / took, 2)}
    return row | {"route_us": round(routed, 2)}


def turned(runtime: DeviceRuntime, tokens: int, norms: bool) -> dict[str, Any]:
    """Rotary embedding and the cache's write, with norms of q and k before: one kernel beside its parts."""
    query = AttentionQuery(32, 8, 128, 128, "bfloat16", "bfloat16", 128**-0.5)
    op = TritonAttention(query, runtime)
    rotate = Rotary(RotaryQuery(128, 128, "bfloat16"), runtime)
    norm = RmsNorm(NormQuery(128, "bfloat16"), runtime)
    weight, table = torch.ones(128, device="cuda"), torch.randn(8192, 128, device="cuda")
    requests = Requests(((300, 1),) * tokens)
    blocks = scattered_blocks(requests, 32, 0)
    caches = make_caches(op, 32, 1 + int(blocks.max()), runtime.device)
    plan = op.plan(make_batch(requests, blocks, 32, runtime.device), 0)
    qkv = torch.randn(tokens, 48, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.split((32, 8, 8), dim=1)
    positions = torch.arange(tokens, device="cuda")
    turn = Turn(positions, table, (weight, weight) if norms else None, 1e-6)

    def parts() -> None:
        heads = (norm(q, weight, 1e-6), norm(k, weight, 1e-6)) if norms else (q, k)
        rotate(positions, *heads, table, True)
        op.write(heads[1], v, *caches, plan)

    one = replayed([lambda: op.turn_and_write(q, k, v, turn, caches, plan)] * 64)
    name = f"{'norms, ' if norms else ''}rotary and write"
    return beside(name, one, replayed([parts] * 64)) | {"tokens": tokens}


def gated(runtime: DeviceRuntime, name: str) -> dict[str, Any]:
    width, out = SHAPES[name]
    op = TritonLinear(LinearQuery(width, out, "bfloat16"), runtime)
    act = SiluAndMul(ActivationQuery(out // 2, "bfloat16"), runtime)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(out, width, **like) for _ in range(16)]
    x = torch.randn(1, width, **like)
    one = replayed([lambda w=w: op.gated(x, (w, None), "silu") for w in weights])
    two = replayed([lambda w=w: act(op(x, (w, None))) for w in weights])
    return beside(f"{name} with activation", one, two)


class _Last:
    """A runtime that says whether the program that ends last combines the parts of a sequence."""

    def __init__(self, runtime: DeviceRuntime, last: bool) -> None:
        self._runtime, self._last = runtime, last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def kernel_options(
        self, kernel: str, query: Any, options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        own = self._runtime.kernel_options(kernel, query, options)
        return {**own, "LAST": self._last} if kernel == "decode" else own


def combined(runtime: DeviceRuntime, batch: int, length: int) -> dict[str, Any]:
    """Split keys combined by the program that ends last, beside a kernel that does it."""
    changed: list[Any] = [_Last(runtime, last) for last in (True, False)]
    one, two = (attention(runtime, batch, length)["us"] for runtime in changed)
    return beside("decode, keys combined", one, two) | {"batch": batch, "length": length}


def beside(what: str, one: float, parts: float) -> dict[str, Any]:
    return {"what": what, "us": round(one, 2), "parts_us": round(parts, 2)}


def sampling(runtime: DeviceRuntime, rows: int) -> Iterator[dict[str, Any]]:
    """Draws from logits of a normal distribution (a wide one, a peaked one, one that is nearly flat), penalties and
    log-probabilities; the limit is one read of the logits."""
    vocab = 128256
    query = SampleQuery(vocab, rows)
    op, score, penalise = (kind(query, runtime) for kind in (Sample, Logprobs, Penalties))
    plain = torch.randn(rows, vocab, device="cuda")
    number = torch.full((rows,), 0.5, device="cuda")
    limit = round(1e6 * 4 * rows * vocab / READ, 2)

    def row(what: str, call: Callable[[], Any]) -> dict[str, Any]:
        us = round(replayed([call] * 4), 2)
        return {"what": what, "rows": rows, "us": us, "limit_us": limit}

    for scale, temperature, top_k, top_p, min_p in (
        (3.0, 0.0, 0, 1.0, 0.0),
        (3.0, 1.0, 0, 1.0, 0.0),
        (3.0, 1.0, 0, 0.9, 0.0),
        (3.0, 1.0, 50, 0.9, 0.0),
        (3.0, 1.0, 0, 1.0, 0.05),
        (6.0, 1.0, 0, 0.9, 0.0),
        (0.02, 1.0, 0, 0.9, 0.0),
    ):
        options = [torch.full_like(number, value) for value in (temperature, top_p, min_p)]
        k = torch.full((rows,), top_k, dtype=torch.int32, device="cuda")
        logits = plain * scale
        arguments = (logits, options[0], k, options[1], options[2], number)
        label = f"T={temperature} k={top_k} p={top_p} min-p={min_p}, logits x{scale}"
        yield row(f"sample, {label}", lambda a=arguments: op(*a))
        if not temperature:
            greedy = (*arguments, True)
            yield row("sample, guarded, greedy", lambda a=greedy: op.guarded(*a))
    ids = plain.argmax(-1)
    for k in (0, 1, 20):
        yield row(f"log-probabilities, {k} of the likeliest", lambda k=k: score(plain, ids, k))
    tokens = torch.randint(vocab, (rows, 2048), dtype=torch.int32, device="cuda")
    order = torch.arange(rows, device="cuda")
    sequences = torch.stack((order, order, order * 0 + 1024, order * 0 + 2048), -1)
    factors = torch.tensor([[1.1, 0.1, 0.1]], device="cuda").expand(rows, 3).contiguous()
    yield row("penalties, 2048 tokens", lambda: penalise(plain, tokens, sequences, factors, 2048))


def launches(runtime: DeviceRuntime) -> dict[str, Any]:
    """Microseconds of the host for an op of one kernel that was launched before, outside of graphs."""
    op = AddRmsNorm(NormQuery(4096, "bfloat16"), runtime)
    x = torch.zeros(2, 4096, device="cuda", dtype=torch.bfloat16)
    residual, weight = x.clone(), torch.ones(4096, device="cuda")
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            op(x, residual, weight, 1e-5)
        best = min(best, time.perf_counter() - start)
    return {"what": "launch of a norm, host", "us": round(1e4 * best, 2)}


def rows(runtime: DeviceRuntime, only: set[str]) -> Iterator[dict[str, Any]]:
    if "launches" in only:
        yield launches(runtime)
    if "experts" in only:
        for name in EXPERTS:
            for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192):
                yield experts(runtime, name, tokens)
    if "fused" in only:
        for tokens, norms in ((1, False), (1, True), (256, False), (256, True)):
            yield turned(runtime, tokens, norms)
        for name in ("8B gate_up", "1B gate_up"):
            yield gated(runtime, name)
        for load in ((1, 600), (1, 8000), (4, 2000), (32, 1100)):
            yield combined(runtime, *load)
    if "linear" in only:
        for name in SHAPES:
            for count in (1, 2, 4, 8, 16, 32, 64, 128):
                yield linear(runtime, name, count)
    if "attention" in only:
        loads = ((1, 600, 1), (1, 8000, 1), (32, 1100, 1), (128, 1200, 1), (256, 300, 1))
        for measured in (*loads, (1, 512, 512), (8, 1024, 1024), (1, 8192, 2048)):
            yield attention(runtime, *measured)
    if "latent" in only:
        for heads in (16, 128):
            for measured in ((1, 8000, 1), (32, 1100, 1), (128, 1200, 1), (4, 2048, 2048)):
                yield attention(runtime, *measured, latent=heads)
    if "sampling" in only:
        for count in (1, 32, 256):
            yield from sampling(runtime, count)


PARTS = ("launches", "experts", "fused", "linear", "attention", "latent", "sampling")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="")
    parser.add_argument("--only", default=",".join(PARTS))
    asked = parser.parse_args()
    platform = CudaPlatform()
    runtime = platform.open(platform.probe()[0])
    results = []
    with torch.inference_mode():
        for row in rows(runtime, set(asked.only.split(","))):
            results.append(row)
            print(row, flush=True)
    runtime.close()
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
