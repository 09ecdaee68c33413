"""What the library's bfloat16 products of one Llama 3.1 8B layer take, by rows: where more rows cost nothing.

python -m benchmarks.cuda.products --json FILE
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.cuda.run import device
from headrace.cli.bench.record import record, write_json

LAYERS, COPIES = 32, 4  # copies of the weights take turns: no cache holds them
SHAPES = {
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
}
ROWS = (32, 64, 128, 192, 256, 320, 384, 512, 576, 640, 768, 1024, 1152, 1280, 2048, 4096, 8192)


def milliseconds(call: Callable[[int], Any], times: int) -> float:
    for number in range(3):
        call(number)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for number in range(times):
        call(number)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


def measure(rows: int, weights: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    """tflop_s: of each matrix, and of all; ms: of all layers."""
    rates, total, operations = {}, 0.0, 0
    for name, (inputs, outputs) in SHAPES.items():
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        some = weights[name]
        times = max(8, min(60, 32000 // rows))
        took = milliseconds(lambda n, x=x, some=some: F.linear(x, some[n % COPIES]), times)
        work = 2 * rows * inputs * outputs
        rates[name] = round(1e-9 * work / took)
        total, operations = total + took, operations + work
    rates["all"] = round(1e-9 * operations / total)
    return {"rows": rows, "ms": round(LAYERS * total, 2), "tflop_s": rates}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", default="")
    asked = parser.parse_args()
    torch.manual_seed(0)
    weights = {
        name: [
            torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02
            for _ in range(COPIES)
        ]
        for name, (inputs, outputs) in SHAPES.items()
    }
    results = []
    for rows in ROWS:
        results.append(measure(rows, weights))
        print(results[-1], flush=True)
    report = record("benchmarks.cuda.products", {}, results)
    report["machine"]["device"] = device()
    if asked.json:
        write_json(asked.json, report)


if __name__ == "__main__":
    main()
