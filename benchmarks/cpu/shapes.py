"""Models of known shapes with made-up weights on this machine's CPU, over HTTP: a large server CPU without its models.

    python -m benchmarks.cpu.shapes --json FILE [--weights bf16,int8,q4] [--only memory,products,decode,profile]

`int8` and `q4` are made of bfloat16 while it is loaded (--quantization). Decode is held against the bytes of the
weights at the bandwidth that all threads together read with; prompts are read with one token of answer. `products`
needs no server: each matrix of a layer by itself, with weights that no cache holds. Every row is printed and written
at once.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.cuda.models import CONFIGS, write
from benchmarks.cuda.run import served, settle
from headrace.cli.bench.load import Load
from headrace.cli.bench.load import run as run_load
from headrace.cli.bench.profile import grouped, summary
from headrace.cli.bench.record import record, write_json
from headrace.platforms.cpu.native_ops import NativeLinear, Panels
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.queries import LinearQuery

BITS = {"bf16": 16.0, "int8": 8.5, "q4": 4.5}  # a weight, with its share of the scales
HEAD_BITS = {"bf16": 16.0, "int8": 8.5, "q4": 8.5}
KINDS = {"bf16": ("bfloat16",), "int8": ("Q8_0",), "q4": ("Q4_0", "Q4_K")}  # of products
# name -> title, concurrency, prompt tokens, output tokens, requests
LOADS = {
    "decode": ("decode", 1, 128, 128, 3),
    "prompt512": ("prompt of 512", 1, 512, 1, 6),
    "prompt2048": ("prompt of 2048", 1, 2048, 1, 3),
    "streams": ("16 streams", 16, 128, 128, 32),
}
PARTS = ("memory", "products", *LOADS, "profile")
STEPS = ((1, 256, 0), (16, 256, 0), (1, 0, 512))  # profiled: requests, context, tokens of a prompt
# Stored rows of one block each (bytes for 32 or 256 weights), all bits drawn but the fp16 scales'.
BLOCKS = {"Q8_0": (32, 34, (0,)), "Q4_0": (32, 18, (0,)), "Q4_K": (256, 144, (0, 2))}
ROWS = ((1, "decode"), (4, "decode"), (16, "decode"), (16, "prompt"), (512, "prompt"))
COLD = 1 << 29  # bytes of weights that take turns


def read_bytes(config: dict[str, Any], weights: str) -> float:
    """What a step reads of the weights: all matrices, the head once."""
    hidden, size = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    heads = config["num_attention_heads"] * 2 + config["num_key_value_heads"] * 2
    layer = hidden * (head * heads + 3 * size)
    matrices, last = config["num_hidden_layers"] * layer, config["vocab_size"] * hidden
    return float(matrices * BITS[weights] + last * HEAD_BITS[weights]) / 8


def described(root: Path = Path("/sys")) -> dict[str, Any]:
    """What decides how fast the processor can be and is easily overlooked: shared cores, caches, pages, clock."""

    def text(where: str) -> str:
        try:
            return (root / where).read_text().strip()
        except OSError:
            return ""

    cpus = root / "devices/system/cpu"
    siblings = {
        text(f"devices/system/cpu/{cpu.name}/topology/thread_siblings_list")
        for cpu in cpus.glob("cpu[0-9]*")
    }
    caches = {}
    for cache in sorted((cpus / "cpu0/cache").glob("index[0-9]")):
        at = f"devices/system/cpu/cpu0/cache/{cache.name}"
        name = f"L{text(f'{at}/level')} {text(f'{at}/type')}"
        caches[name] = f"{text(f'{at}/size')}, shared by {text(f'{at}/shared_cpu_list')}"
    clocks = [
        float(line.partition(":")[2])
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("cpu MHz")
    ]
    return {
        "what": "machine",
        "siblings": sorted(siblings),
        "caches": caches,
        "huge_pages": text("kernel/mm/transparent_hugepage/enabled"),
        "nodes": len(list((root / "devices/system/node").glob("node[0-9]*"))),
        "mhz": [min(clocks), max(clocks)] if clocks else None,
    }


def plain_read(threads: int, megabytes: int = 512) -> float:
    """Bytes a second of sums over an array of numpy's, a part for each thread: the best of four."""
    parts = np.array_split(np.ones(megabytes << 17), threads)
    best = float("inf")
    for _ in range(4):
        workers = [threading.Thread(target=part.sum) for part in parts]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = min(best, time.perf_counter() - began)
    return (megabytes << 20) / best


def stored(kind: str, n: int, k: int) -> Any:
    """n rows of k made-up weights."""
    rng = np.random.default_rng(1)
    if kind == "bfloat16":
        return torch.from_numpy(rng.standard_normal((n, k), np.float32)).bfloat16()
    block, size, halves = BLOCKS[kind]
    raw = rng.integers(0, 256, (n * k // block, size), np.uint8)
    for at in halves:
        raw[:, at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return raw.reshape(n, -1)


def products(
    config: dict[str, Any], kinds: list[str], runtime: Any, seconds: float
) -> Iterator[dict[str, Any]]:
    """Each kind of matrix by itself: GB/s of its weights and TFLOP/s, the median of calls that take turns on copies."""
    hidden, size = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    qkv = head * (config["num_attention_heads"] + 2 * config["num_key_value_heads"])
    shapes = {"qkv": (hidden, qkv), "gate_up": (hidden, 2 * size), "down": (size, hidden)}
    for kind in kinds:
        for name, (k, n) in shapes.items():
            query = LinearQuery(k, n, "bfloat16", "" if kind == "bfloat16" else kind)
            # calls outside of a captured step count as prompts', unless they say what they give
            decode = dataclasses.replace(query, out_dtype="bfloat16")
            ops = {"prompt": NativeLinear(query, runtime), "decode": NativeLinear(decode, runtime)}
            first = ops["prompt"].pack(stored(kind, n, k), None)
            more = max(COLD // first.data.nbytes - 1, 0)
            held = [first, *(Panels(first.data.clone(), kind, n, k) for _ in range(more))]
            for rows, step in ROWS:
                op, x, times = ops[step], torch.randn(rows, k).bfloat16(), []
                out, began = op.empty(rows, n), time.perf_counter()
                while len(times) < 3 or time.perf_counter() - began < seconds:
                    start = time.perf_counter()
                    op(x, held[len(times) % len(held)], out)
                    times.append(time.perf_counter() - start)
                took = sorted(times)[len(times) // 2]
                yield {
                    "what": "product",
                    "weights": kind,
                    "matrix": f"{name} {k}x{n}",
                    "rows": rows,
                    "step": step,
                    "us": round(took * 1e6, 1),
                    "gb_s": round(first.data.nbytes / took / 1e9, 1),
                    "tflop_s": round(2 * rows * k * n / took / 1e12, 2),
                }


def profiles(where: Any) -> Iterator[dict[str, Any]]:
    """Steps op by op (`headrace bench profile`): ms of all calls, and how near the limit they come."""
    for requests, context, prompt in STEPS:
        asked = f"requests={requests}&context={context}&prompt={prompt}"
        answer = httpx.get(f"{where.url}/debug/step?{asked}", timeout=120)
        step = answer.raise_for_status().json()
        rows = grouped(step)
        whole = summary(step, rows)
        yield {
            "what": f"step: {asked}",
            "ms": round(whole["step_s"] * 1e3, 2),
            "limit_ms": whole["limit_s"] and round(whole["limit_s"] * 1e3, 2),
            "host_ms": round(whole["host_s"] * 1e3, 2),
            "ops": [
                [
                    f"{row['count']} {row['op']} {row['detail']}".strip(),
                    round(row["seconds"] * 1e3, 3),
                    row["of_limit"] and round(row["of_limit"], 2),
                ]
                for row in rows
            ],
        }


def measure(
    name: str, weights: str, folder: Path, bandwidth: float, only: list[str]
) -> Iterator[dict[str, Any]]:
    extra = ["--device=cpu"]
    if weights != "bf16":
        extra.append(f"--quantization={weights}")
    limit = bandwidth / read_bytes(CONFIGS[name], weights)
    told = {"model": name, "weights": weights}
    with served(write(name, folder), extra, folder / f"{weights}.log") as (where, ready):
        yield {**told, "what": "start", "ready_s": round(ready, 1)}
        served_name = httpx.get(f"{where.url}/v1/models").json()["data"][0]["id"]
        if "decode" in only or "streams" in only:
            settle(where, 20)
        for key in only:
            if key == "profile":
                for row in profiles(where):
                    yield {**told, **row}
            if key not in LOADS:
                continue
            what, concurrency, prompt, output, requests = LOADS[key]
            load = Load(
                prompt_tokens=prompt,
                output_tokens=output,
                requests=requests,
                concurrency=concurrency,
                warmup=1,
                seed=f"{time.time_ns()}",
            )
            figures = asyncio.run(run_load(where, served_name, load))
            row = {**told, "what": what}
            if what == "decode":
                speed = 1e3 / figures["tpot_ms"]["p50"]
                row |= {"tok_s": round(speed, 1), "limit_tok_s": round(limit, 1)}
            elif output == 1:
                row["tok_s"] = round(1e3 * prompt / figures["ttft_ms"]["p50"], 1)
                row["best_tok_s"] = round(1e3 * prompt / figures["ttft_ms"]["min"], 1)
            else:
                row["tok_s"] = round(figures["output_tokens_per_s"], 1)
            yield row


def rows(asked: argparse.Namespace, only: list[str], scratch: Path) -> Iterator[dict[str, Any]]:
    yield described()
    platform = CpuPlatform()
    runtime: Any = platform.open(platform.probe()[0])
    bandwidth = runtime.read_bandwidth()
    threads = torch.get_num_threads()
    row = {"what": "read bandwidth", "gb_s": round(bandwidth / 1e9, 1), "threads": threads}
    if "memory" in only:
        row["numpy_gb_s"] = round(plain_read(threads) / 1e9, 1)
    yield row
    if "products" in only:
        kinds = [kind for weights in asked.weights.split(",") for kind in KINDS[weights]]
        yield from products(CONFIGS[asked.model], kinds, runtime, asked.seconds)
    runtime.close()
    if set(only) - {"memory", "products"}:
        for weights in asked.weights.split(","):
            yield from measure(asked.model, weights, scratch, bandwidth, only)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.2-1b", choices=sorted(CONFIGS))
    parser.add_argument("--weights", default=",".join(BITS))
    parser.add_argument("--only", default=",".join(PARTS), help="in this order")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each product")
    parser.add_argument("--json", default="")
    parser.add_argument("--commit", default="", help="where the checkout has no git to ask")
    asked = parser.parse_args()
    only = asked.only.split(",")
    if unknown := set(only) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; take of: {', '.join(PARTS)}")
    results: list[dict[str, Any]] = []
    report = record("benchmarks.cpu.shapes", {"model": asked.model, "only": asked.only}, results)
    report["commit"] = asked.commit or report["commit"]
    with tempfile.TemporaryDirectory() as scratch:
        for row in rows(asked, only, Path(scratch)):
            results.append(row)
            print(json.dumps(row), flush=True)
            if asked.json:
                write_json(asked.json, report)


if __name__ == "__main__":
    main()
