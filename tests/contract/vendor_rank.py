"""One rank over a vendor's way to add up, in a process of its own: `python -m tests.contract.vendor_rank RANK FOLDER`.

The code of the platforms runs as it is; gloo stands in for NCCL and RCCL, and below it what cannot be had here does as
its documentation says: AITER's class with the signatures of each release, PyTorch's operator on symmetric memory.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from headrace.platforms.collectives import OP, GroupSpec
from headrace.platforms.cuda import symmetric_memory
from headrace.platforms.cuda.platform import CudaPlatform
from headrace.platforms.graph import EagerGraphs
from headrace.platforms.groups import open_group
from headrace.platforms.platform import Platform
from headrace.platforms.reference.checks.collectives import check_group
from headrace.platforms.registry import Policy, Registry, SelectionReport
from headrace.platforms.rocm.aiter import vendor
from headrace.platforms.rocm.platform import RocmPlatform
from headrace.platforms.torch_device.collectives import NcclCollectives
from tests.platforms.rocm import fake_aiter
from tests.platforms.rocm.aiter_facts import load

CPU = torch.device("cpu")
CALLS: Counter[str] = Counter()


def one_shot(buffer: torch.Tensor, x: torch.Tensor, kind: str, name: str) -> torch.Tensor:
    """`symm_mem::one_shot_all_reduce_copy` with what its CUDA kernel insists on."""
    assert kind == "sum" and buffer.dtype == x.dtype and buffer.dtype in symmetric_memory.DTYPES
    assert buffer.numel() == x.numel() and buffer.is_contiguous() and x.is_contiguous()
    assert not (x.numel() * x.element_size()) % 4 and not x.storage_offset()
    CALLS["one_shot"] += 1
    buffer.copy_(x)
    total = buffer.clone()
    dist.all_reduce(total, group=GROUPS[name])
    return total


GROUPS: dict[str, Any] = {}


def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((size,), torch.nan, dtype=dtype, device=device)


def rendezvous(buffer: torch.Tensor, name: str) -> None:
    GROUPS[name] = next(
        group for group in dist.distributed_c10d._world.pg_map if group.group_name == name
    )


def opened(rank: int, path: str, platform: Platform, arch: str, bad: bool) -> dict[str, Any]:
    info = platform.describe(arch)
    rows = [dataclasses.replace(row, requires=()) for row in platform.implementations()]
    runtime: Any = SimpleNamespace(info=info, device=CPU, graphs=EagerGraphs)
    report = SelectionReport()
    CALLS.clear()
    with open_group(
        GroupSpec(rank, 2, f"file://{path}"),
        runtime,
        Registry.with_reference(rows),
        Policy(),
        report,
    ) as group:
        if not bad:
            check_group(group, runtime, rank, 2)
            for size in (4, 8):  # a part of a larger tensor, which begins anywhere in it
                part = torch.ones(3, size)[1:2]
                assert torch.equal(group.all_reduce(part), torch.full((1, size), 2.0))
            assert torch.equal(group.all_reduce(torch.ones(0, 8)), torch.ones(0, 8))
    (decision,) = [one for one in report.decisions if one.op == OP]
    table = {row.name: row.reasons for row in decision.candidates}
    return {"chosen": decision.chosen, "table": table, "calls": dict(CALLS)}


def main() -> None:
    rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    NcclCollectives.backend = "gloo"
    symmetric_memory.symmetric_memory = SimpleNamespace(empty=empty, rendezvous=rendezvous)  # type: ignore[assignment]
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("one_shot_all_reduce_copy", one_shot, "CPU")
    said = {"cuda": opened(rank, f"{folder}/cuda", CudaPlatform(), "sm_90", False)}
    right = fake_aiter.CustomAllreduce.custom_all_reduce

    def wrong(self: Any, input: torch.Tensor, **rest: Any) -> torch.Tensor | None:
        total = right(self, input, **rest)
        if total is not None and rank == 0:
            total.view(-1)[0] += 1
        return total

    for number, entry in enumerate(load()):
        for bad in (False, True):
            fake_aiter.CustomAllreduce.custom_all_reduce = wrong if bad else right  # type: ignore[method-assign]
            sys.modules.update(fake_aiter.modules(entry, CALLS))
            vendor.forget()
            name = f"rocm {number}" + (", wrong" if bad else "")
            said[name] = opened(rank, f"{folder}/{name}", RocmPlatform(), "gfx942", bad)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
