"""Kernels against their limits: products of few rows beside the vendor's library, attention against its bytes.

    python -m benchmarks.cuda.kernels [--json FILE]

Each figure is the time of one call among many that a graph replays back to back, over weights that together exceed
the cache many times, as the layers of a model do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from headrace.platforms.cuda.platform import CudaPlatform
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import AttentionQuery, LinearQuery
from headrace.platforms.reference.cases import Requests, make_batch, make_caches, scattered_blocks
from headrace.platforms.triton.attention import TritonAttention
from headrace.platforms.triton.linear import TritonLinear

# in, out: Llama 3.1 8B, then Llama 3.2 1B
SHAPES = {
    "8B qkv": (4096, 6144),
    "8B o": (4096, 4096),
    "8B gate_up": (4096, 28672),
    "8B down": (14336, 4096),
    "8B head": (4096, 128256),
    "1B qkv": (2048, 3072),
    "1B gate_up": (2048, 16384),
    "1B down": (8192, 2048),
}
CACHE_BYTES = 1 << 30


def replayed(calls: list[Callable[[], Any]], repeats: int = 5) -> float:
    """Microseconds of one of `calls`, replayed one after the other."""
    stream = torch.cuda.Stream()
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
    ours = replayed([lambda w=w: op(x, (w, None)) for w in weights]) if rows == 1 else None
    library = replayed([lambda w=w: F.linear(x, w) for w in weights])
    row = {"what": name, "rows": rows, "library_us": round(library, 2)}
    row["library_tb_s"] = round(nbytes / library / 1e6, 2)
    if ours:
        row |= {"ours_us": round(ours, 2), "ours_tb_s": round(nbytes / ours / 1e6, 2)}
    return row


def attention(runtime: DeviceRuntime, batch: int, length: int, new: int = 1) -> dict[str, Any]:
    query = AttentionQuery(32, 8, 128, 128, "bfloat16", "bfloat16", 128**-0.5)
    op = TritonAttention(query, runtime)
    requests = Requests(((length, new),) * batch)
    table = scattered_blocks(requests, 32, 0)
    layers = max(2, min(16, (CACHE_BYTES * 2) // (4096 * batch * length)))
    caches = [make_caches(op, 32, 1 + int(table.max()), runtime.device) for _ in range(layers)]
    for pair in caches:
        for cache in pair:
            cache.normal_()
    q = torch.randn(batch * new, 32, 128, device="cuda", dtype=torch.bfloat16)
    plan = op.plan(make_batch(requests, table, 32, runtime.device), 0)
    took = replayed([lambda c=pair: op.attend(q, *c, plan) for pair in caches])
    nbytes = 4096 * batch * length
    flops = 4 * 32 * 128 * batch * (new * (length - new) + new * (new + 1) / 2)
    return {
        "what": "decode" if new == 1 else "prefill",
        "batch": batch,
        "length": length,
        "splits": plan.splits,
        "us": round(took, 2),
        "tb_s": round(nbytes / took / 1e6, 2),
        "tflop_s": round(flops / took / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="")
    asked = parser.parse_args()
    platform = CudaPlatform()
    runtime = platform.open(platform.probe()[0])
    results = []
    with torch.inference_mode():
        for name in SHAPES:
            for rows in (1, 2, 16, 64):
                results.append(linear(runtime, name, rows))
                print(results[-1], flush=True)
        loads = ((1, 600, 1), (1, 8000, 1), (32, 1100, 1), (128, 1200, 1), (256, 300, 1))
        for load in (*loads, (1, 512, 512), (8, 1024, 1024), (1, 8192, 2048)):
            results.append(attention(runtime, *load))
            print(results[-1], flush=True)
    runtime.close()
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
