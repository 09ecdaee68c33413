"""Run one group of the kernels' queries in Triton's interpreter; a line for each that is wrong, exit code 1.

TRITON_INTERPRET=1 python -m tests.platforms.triton.interpreted GROUP DTYPE
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch

from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.reference.compare import compare
from headrace.platforms.registry import Registry, always
from headrace.platforms.triton import experts, mla
from headrace.platforms.triton.rows import implementations
from tests.platforms.triton import queries


def main(group: str, dtype: str) -> int:
    torch.set_num_threads(1)
    platform = CpuPlatform()
    runtime = platform.open(platform.probe()[0])
    # one unit: few programs are enough to fill it, so sequences are not split; many: they are
    wrong = 0
    if group == "sorted experts":  # many programs sort where otherwise one does
        experts.ONE_CHUNK = experts.CHUNK = 64
    if group == "few rows":  # instead of the library
        few = {"BLOCK_N": 32, "BLOCK_K": 32, "SPLITS": 2}
        runtime.kernel_options = lambda kernel, _query, _: few if kernel == "few_rows" else {}
    if group == "latent":  # heads are divided over programs where there are more
        mla.MOST_HEADS = 2
    if group == "tiled experts":  # as on a device that copies tiles; this one would not choose to
        runtime.info = dataclasses.replace(runtime.info, features=frozenset({"tma"}))
        runtime.kernel_options = tiled
    groups = {
        "rows": queries.rows,
        "few rows": queries.few_rows,
        "experts": queries.experts,
        "sorted experts": queries.sorted_experts,
        "tiled experts": queries.tiled_experts,
        "attention": queries.attentions,
        "latent": queries.latents,
        "sample": queries.samples,
        "logits": queries.logits,
    }
    asked = groups[group](dtype)
    for units in {"attention": (1, 64)}.get(group, (64,)):
        runtime.info = dataclasses.replace(runtime.info, units=units)
        registry = Registry.with_reference(implementations("test", lambda check, device: check))
        for op, query in asked:
            ours, reference = (
                _make(registry, op, name, query, runtime) for name in ("triton", "reference")
            )
            result = compare(CONTRACTS[op], query, ours, reference, runtime.device)
            if not result.within:
                wrong += 1
                print(f"{op} {query} on {units} units: {result}")
    return 1 if wrong else 0


def tiled(kernel: str, query: object, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Weights first for short tiles, and a program for every tile of some heights, but not of all."""
    if "TILED" not in options:
        return {}
    rows = options["BLOCK_M"]
    programs = {16: 2, 32: 0, 64: 1}.get(rows, 0)
    chosen = {"TILED": True, "SWAP": rows < 64, "PROGRAMS": programs}
    return {**chosen, "BLOCK_N": 32, "BLOCK_K": 64}


def _make(registry: Registry, op: str, name: str, query: object, runtime: object) -> object:
    row = next(row for row in registry.candidates(op) if row.name == name)
    assert name == "reference" or row.supports is not always
    target = row.load()
    made = CONTRACTS[op].kind == "class" or row.per_query
    return target(query, runtime) if made else target


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
