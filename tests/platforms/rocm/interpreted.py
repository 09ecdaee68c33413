"""Run the shared kernels in Triton's interpreter as an AMD device would launch them; exit code 1 when one is wrong.

TRITON_INTERPRET=1 python -m tests.platforms.rocm.interpreted ARCH GROUP DTYPE

Group "aiter": AITER's attention by the stand-in, over a cache that the shared kernels write.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from functools import partial
from typing import Any

import torch

from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.reference.compare import compare
from headrace.platforms.registry import Registry
from headrace.platforms.rocm import tuning
from headrace.platforms.rocm.platform import RocmPlatform
from tests.platforms.rocm import fake_aiter
from tests.platforms.rocm.aiter_facts import load
from tests.platforms.triton import queries

GROUPS = {
    "rows": queries.rows,
    # the others differ in nothing that a device changes
    "attention": lambda dtype: queries.attentions(dtype)[1:2],
    "aiter": lambda dtype: queries.attentions(dtype)[1:2],
    "experts": lambda dtype: [q for q in queries.experts(dtype) if q[0] == "fused_experts"][:1],
}


def main(arch: str, group: str, dtype: str) -> int:
    torch.set_num_threads(1)
    platform, described = CpuPlatform(), RocmPlatform.describe(arch)
    runtime: Any = platform.open(platform.probe()[0])
    # computes here, launches as there
    runtime.info = dataclasses.replace(described, units=16)
    runtime.kernel_options = partial(tuning.kernel_options, described.features)
    registry = Registry.with_reference(RocmPlatform().implementations())
    wrong, name = 0, "triton"
    if group == "aiter":
        name = "aiter"
        sys.modules.update(fake_aiter.modules(load()[0], Counter()))
    for op, query in GROUPS[group](dtype):
        rows = {row.name: row for row in registry.candidates(op)}
        assert rows[name].supports(query, described).status == "unverified"
        made = []
        for row in (rows[name], rows["reference"]):
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
