"""Models of known shapes with made-up weights on this machine's CPU, over HTTP: a large server CPU without its models.

    python -m benchmarks.cpu.shapes --json benchmarks/results/cpu-shapes.json [--weights bf16,int8,q4]

`int8` and `q4` are made of bfloat16 while it is loaded (--quantization). Decode is held against the bytes of the
weights at the bandwidth that all threads together read with; prompts are read with one token of answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cuda.models import CONFIGS, write
from benchmarks.cuda.run import served
from headrace.cli.bench.load import Load
from headrace.cli.bench.load import run as run_load
from headrace.cli.bench.record import record, write_json
from headrace.platforms.cpu.platform import CpuPlatform

BITS = {"bf16": 16.0, "int8": 8.5, "q4": 5.0}  # a weight, with its share of the scales
# name, concurrency, prompt tokens, output tokens, requests
LOADS = (
    ("decode", 1, 128, 128, 3),
    ("prompt of 512", 1, 512, 1, 6),
    ("prompt of 2048", 1, 2048, 1, 3),
    ("16 streams", 16, 128, 128, 32),
)


def parameters(config: dict[str, Any]) -> int:
    """Weights that a step reads: all matrices, the head once."""
    hidden, size = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    heads = config["num_attention_heads"] * 2 + config["num_key_value_heads"] * 2
    layer = hidden * (head * heads + 3 * size)
    return int(config["num_hidden_layers"] * layer + config["vocab_size"] * hidden)


def measure(name: str, weights: str, folder: Path, bandwidth: float) -> list[dict[str, Any]]:
    extra = ["--device=cpu"]
    if weights != "bf16":
        extra.append(f"--quantization={weights}")
    limit = bandwidth / (parameters(CONFIGS[name]) * BITS[weights] / 8)
    rows: list[dict[str, Any]] = []
    with served(write(name, folder), extra, folder / f"{weights}.log") as (where, ready):
        served_name = httpx.get(f"{where.url}/v1/models").json()["data"][0]["id"]
        for what, concurrency, prompt, output, requests in LOADS:
            load = Load(
                prompt_tokens=prompt,
                output_tokens=output,
                requests=requests,
                concurrency=concurrency,
                warmup=1,
                seed=f"{time.time_ns()}",
            )
            figures = asyncio.run(run_load(where, served_name, load))
            row = {"model": name, "weights": weights, "what": what, "ready_s": round(ready, 1)}
            if what == "decode":
                speed = 1e3 / figures["tpot_ms"]["p50"]
                row |= {"tok_s": round(speed, 1), "limit_tok_s": round(limit, 1)}
            elif output == 1:
                row["tok_s"] = round(1e3 * prompt / figures["ttft_ms"]["p50"], 1)
            else:
                row["tok_s"] = round(figures["output_tokens_per_s"], 1)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.2-1b", choices=sorted(CONFIGS))
    parser.add_argument("--weights", default=",".join(BITS))
    parser.add_argument("--json", default="")
    parser.add_argument("--commit", default="", help="where the checkout has no git to ask")
    asked = parser.parse_args()
    platform = CpuPlatform()
    runtime: Any = platform.open(platform.probe()[0])
    bandwidth = runtime.read_bandwidth()
    runtime.close()
    print(f"reads {bandwidth / 1e9:.0f} GB/s", flush=True)
    results: list[dict[str, Any]] = [{"what": "read bandwidth", "gb_s": round(bandwidth / 1e9, 1)}]
    with tempfile.TemporaryDirectory() as scratch:
        for weights in asked.weights.split(","):
            results += measure(asked.model, weights, Path(scratch), bandwidth)
    report = record("benchmarks.cpu.shapes", {"model": asked.model}, results)
    report["commit"] = report["commit"] or asked.commit
    if asked.json:
        write_json(asked.json, report)


if __name__ == "__main__":
    main()
