"""Run every kernel of the platform once or a few times on small inputs, for tools that watch memory and order:

python -m tests.platforms.cuda.small [--seconds 60]

Results are not looked at here; test_contracts.py holds them to the reference. Says which kernels were launched and
which ones of the folder were not, and exits with 1 when the time was up before all queries had run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from headrace.platforms.cuda.platform import CudaPlatform
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.reference.compare import cases_of
from headrace.platforms.registry import Registry
from headrace.platforms.triton import compile_all, experts, launch
from tests.platforms.triton import queries

DTYPE = "bfloat16"


def asked() -> Iterator[tuple[str, Any]]:
    yield from queries.rows(DTYPE)
    yield from queries.few_rows(DTYPE)
    yield from queries.samples(DTYPE)
    yield from queries.logits(DTYPE)
    yield from queries.attentions(DTYPE)
    yield from queries.latents(DTYPE)
    yield queries.attention(32, 8, 128, DTYPE)
    yield from queries.experts(DTYPE)
    experts.ONE_CHUNK = experts.CHUNK = 64  # many programs sort where otherwise one does
    yield from queries.sorted_experts(DTYPE)


class FewRows(dict[str, dict[str, int]]):
    """Tuned options by which products of few rows are the kernel's and not the library's."""

    def get(self, key: str, default: Any = None) -> Any:
        return {"BLOCK_N": 32, "SPLITS": 2} if key.startswith("few_rows ") else default


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    deadline = time.monotonic() + parser.parse_args().seconds
    launched: Counter[str] = Counter()
    call = launch.Launcher.__call__

    def counted(self: launch.Launcher, grid: Any, *arguments: Any) -> None:
        launched[self._kernel.__name__] += 1
        call(self, grid, *arguments)

    launch.Launcher.__call__ = counted  # type: ignore[method-assign]
    platform = CudaPlatform()
    runtime = platform.open(platform.probe()[0])
    runtime.tuned = FewRows(all={})
    registry = Registry.with_reference(platform.implementations())
    late = []
    with torch.inference_mode():
        for op, query in asked():
            row = next(row for row in registry.candidates(op) if row.name == "triton")
            if row.supports(query, runtime.info).status == "no":
                continue
            if time.monotonic() > deadline:
                late.append(f"{op} {query}")
                continue
            target = row.load()
            made = target(query, runtime)
            for case in cases_of(CONTRACTS[op], query, runtime.device):
                case.run(made)
            runtime.synchronize()
    every = {variant.kernel.__name__ for variant in compile_all.variants(runtime)}
    for name, count in sorted(launched.items()):
        print(f"{name}: {count} launches")
    print("not launched:", ", ".join(sorted(every - set(launched))) or "none")
    for text in late:
        print("no time left for", text)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
