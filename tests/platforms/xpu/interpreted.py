"""Run the shared kernels in Triton's interpreter as an Intel GPU would launch them; exit code 1 when one is wrong.

TRITON_INTERPRET=1 python -m tests.platforms.xpu.interpreted ARCH GROUP DTYPE
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from typing import Any

import torch

from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.reference.compare import compare
from headrace.platforms.registry import Registry
from headrace.platforms.xpu import tuning
from headrace.platforms.xpu.platform import XpuPlatform
from tests.platforms.triton import queries

# Of the other kernels only the number of warps differs, which the interpreter does not have.
GROUPS = {
    "attention": lambda dtype: queries.attentions(dtype)[1:2],
    "experts": lambda dtype: [q for q in queries.experts(dtype) if q[0] == "fused_experts"][:1],
}


def main(arch: str, group: str, dtype: str) -> int:
    torch.set_num_threads(1)
    platform, described = CpuPlatform(), XpuPlatform.describe(arch)
    runtime: Any = platform.open(platform.probe()[0])
    # computes here, launches as there
    runtime.info = dataclasses.replace(described, units=16)
    runtime.kernel_options = partial(tuning.kernel_options, described.features)
    registry = Registry.with_reference(XpuPlatform().implementations())
    wrong = 0
    for op, query in GROUPS[group](dtype):
        rows = {row.name: row for row in registry.candidates(op)}
        assert rows["triton"].supports(query, described).status == "unverified"
        made = []
        for row in (rows["triton"], rows["reference"]):
            target = row.load()
            bound = CONTRACTS[op].kind == "class" or row.per_query
            made.append(target(query, runtime) if bound else target)
        result = compare(CONTRACTS[op], query, *made, runtime.device)
        if not result.within:
            wrong += 1
            print(f"{op} {query} as on {arch}: {result}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
