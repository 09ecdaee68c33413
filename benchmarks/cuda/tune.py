"""Which launch options are fastest for the experts of a model, and for attention: every candidate is timed.

    python -m benchmarks.cuda.tune [--model Qwen3-30B-A3B] [--json FILE]

Prints the best three of each kernel and size beside the options in use. They are written into GATE_UP and DOWN of
platforms/triton/experts.py by hand, after a look at how much they win.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import ExpertsQuery, RouterQuery

# tokens of a step whose experts' tiles have so many rows, by the model (experts, of them for a token, ...)
SIZES = {
    "Qwen3-30B-A3B": ((128, 8, 2048, 768), {1: 1, 16: 16, 128: 16, 256: 16, 512: 32, 1024: 64}),
    "Mixtral 8x7B": ((8, 2, 4096, 14336), {1: 1, 16: 16, 64: 16, 128: 32, 256: 64, 1024: 128}),
}
PREFILL = 8192  # tokens
CANDIDATES = {
    "experts_gate_up": product((32, 64, 128), (64, 128), (4, 8), (2, 3, 4)),
    "experts_down": product((64, 128, 256), (64, 128), (4, 8), (2, 3, 4)),
    "experts_gate_up_row": product((1, 2, 4, 8), (256, 512, 1024, 2048), (2, 4, 8), (1,)),
    "experts_down_row": product((1, 2, 4), (128, 256, 512), (2, 4, 8), (1,)),
}


class Overridden:
    """A runtime that wants some options of some kernels otherwise."""

    def __init__(self, runtime: DeviceRuntime, changes: Mapping[str, Mapping[str, Any]]) -> None:
        self._runtime, self._changes = runtime, changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def kernel_options(
        self, kernel: str, query: Any, options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        own = self._runtime.kernel_options(kernel, query, options)
        return {**own, **self._changes.get(kernel, {})}


def timed(
    runtime: DeviceRuntime, query: ExpertsQuery, tokens: int, packed: list[Any], changes: Any
) -> float:
    """Microseconds of all experts' kernels; infinity where the options do not work."""
    from benchmarks.cuda.kernels import replayed
    from headrace.platforms.triton.experts import TritonExperts
    from headrace.platforms.triton.routing import TopkSoftmax

    changed: Any = Overridden(runtime, changes)
    op = TritonExperts(query, changed)
    route = TopkSoftmax(RouterQuery(query.experts, query.top_k, True), runtime)
    torch.manual_seed(0)
    x = torch.randn(tokens, query.hidden, device="cuda", dtype=torch.bfloat16)
    chosen = [
        route(torch.randn(tokens, query.experts, device="cuda"), query.top_k, True) for _ in packed
    ]
    try:
        return replayed(
            [lambda c=c, p=p: op(x, *c, p) for c, p in zip(chosen, packed, strict=True)] * 2, 3
        )
    except Exception as error:  # too much shared memory, say: a finding, and the others go on
        print(f"  {changes}: {type(error).__name__}", flush=True)
        return float("inf")


def tuned(runtime: DeviceRuntime, model: str) -> Iterator[dict[str, Any]]:
    shape, sizes = SIZES[model]
    query = ExpertsQuery(*shape, "bfloat16")
    like = {"device": "cuda", "dtype": torch.bfloat16}
    packed = [
        (
            torch.randn(query.experts, 2 * query.intermediate, query.hidden, **like),
            torch.randn(query.experts, query.hidden, query.intermediate, **like),
        )
        for _ in range(3)
    ]
    candidates = {kernel: list(options) for kernel, options in CANDIDATES.items()}
    for tokens in (*sizes, PREFILL):
        names = [name for name in candidates if name.endswith("_row") == (tokens == 1)]
        best_so_far: dict[str, Any] = {}
        for kernel in names:
            results = {(): timed(runtime, query, tokens, packed, best_so_far)}
            for options in candidates[kernel]:
                keys = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
                change = dict(zip(keys, options, strict=True))
                took = timed(runtime, query, tokens, packed, {**best_so_far, kernel: change})
                results[options] = took
            order = sorted(results, key=lambda key: results[key])
            if order[0]:
                keys = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
                best_so_far[kernel] = dict(zip(keys, order[0], strict=True))
            yield {
                "model": model,
                "tokens": tokens,
                "kernel": kernel,
                "now_us": round(results[()], 2),
                "best": {str(key): round(results[key], 2) for key in order[:3]},
            }


def main() -> None:
    from headrace.platforms.cuda.platform import CudaPlatform

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen3-30B-A3B", choices=sorted(SIZES))
    parser.add_argument("--json", default="")
    asked = parser.parse_args()
    platform = CudaPlatform()
    runtime = platform.open(platform.probe()[0])
    results = []
    with torch.inference_mode():
        for row in tuned(runtime, asked.model):
            results.append(row)
            print(row, flush=True)
    runtime.close()
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
