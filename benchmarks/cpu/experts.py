"""Mixture of experts: the native kernels against PyTorch's operators, one layer, random weights, tokens spread evenly.

    python benchmarks/cpu/experts.py [--experts 64] [--json FILE]

Times are the best of several runs, in milliseconds; both implementations take turns, so that what else the machine does
meets both. `GB/s`: bytes of the weights of the experts in use over the native time.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from headrace.engine.weights.encode import encode
from headrace.platforms.cpu.experts import NativeExperts, TorchExperts
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.queries import ExpertsQuery

TOKENS = (1, 4, 16, 64, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runtime = CpuPlatform().open(CpuPlatform.probe()[0])
    sizes = (options.experts, options.top_k, options.hidden, options.intermediate)
    w13 = torch.randn(options.experts, 2 * options.intermediate, options.hidden) * 0.02
    w2 = torch.randn(options.experts, options.hidden, options.intermediate) * 0.02
    rows = []
    plain = TorchExperts(ExpertsQuery(*sizes, "bfloat16"), runtime)
    truth = plain.pack(w13.bfloat16(), w2.bfloat16())
    for scheme in ("", "Q8_0", "Q4_0"):
        op = NativeExperts(ExpertsQuery(*sizes, "bfloat16", scheme, scheme), runtime)
        if scheme:
            packed = op.pack([encode(w, scheme) for w in w13], [encode(w, scheme) for w in w2])
        else:
            packed = op.pack(w13.bfloat16(), w2.bfloat16())
        one = sum(panels.data.nbytes for panels in packed.experts[0])
        for tokens in TOKENS:
            x = torch.randn(tokens, options.hidden).bfloat16()
            weights, ids = torch.randn(tokens, options.experts).softmax(-1).topk(options.top_k)
            ids = ids.int()
            times = [[], []]
            for _ in range(options.runs):
                for mine, (each, held) in zip(times, ((op, packed), (plain, truth)), strict=True):
                    start = time.perf_counter()
                    each(x, weights, ids, held)
                    mine.append(time.perf_counter() - start)
            native, torch_s = (min(each) for each in times)
            used = len(ids.unique())
            rows.append(
                {
                    "scheme": scheme or "bfloat16",
                    "tokens": tokens,
                    "native_ms": native * 1e3,
                    "torch_bfloat16_ms": torch_s * 1e3,
                    "ratio": torch_s / native,
                    "gb_s": one * used / native / 1e9,
                }
            )
            print(
                "  ".join(f"{v:.2f}" if isinstance(v, float) else f"{v}" for v in rows[-1].values())
            )
    if options.json:
        machine = {"device": runtime.info.name, "isa": op._kernels.isa, "sizes": sizes}
        options.json.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
