"""Collectives: two processes over gloo, and the group of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.platforms.collectives import GroupSpec, SoloCollectives

RANK = """
import sys, torch
from headrace.platforms.collectives import GroupSpec
from headrace.platforms.cpu.platform import CpuPlatform

rank, world = int(sys.argv[1]), int(sys.argv[2])
platform = CpuPlatform()
runtime = platform.open(platform.probe()[0])
group = runtime.collectives(GroupSpec(rank, world, "file://" + sys.argv[3]))
assert (group.rank, group.world) == (rank, world)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x = torch.arange(6, dtype=dtype).view(2, 3) + 10 * rank
    total = sum(torch.arange(6, dtype=dtype).view(2, 3) + 10 * r for r in range(world))
    assert torch.equal(group.all_reduce(x.clone()), total)
    assert torch.equal(group.all_reduce(x.t()), total.t()), "a strided tensor"
    parts = [torch.arange(6, dtype=dtype).view(2, 3) + 10 * r for r in range(world)]
    for dim in (0, 1, -1):
        assert torch.equal(group.all_gather(x, dim), torch.cat(parts, dim))
    assert torch.equal(group.all_gather(x.t(), 0), torch.cat([p.t() for p in parts], 0))
    assert torch.equal(group.broadcast(x.clone(), 1), parts[1])
ids = torch.full((4,), rank, dtype=torch.int64)
assert group.broadcast(ids, 0).tolist() == [0] * 4
group.barrier()
group.close()
group.close()
runtime.close()
"""


def test_two_processes(tmp_path: Path):
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "rendezvous")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said


def test_a_group_of_one(runtime):
    group = runtime.collectives(GroupSpec(0, 1, ""))
    assert isinstance(group, SoloCollectives) and group.capture_safe
    x = torch.arange(4.0)
    for result in (group.all_reduce(x), group.all_gather(x), group.broadcast(x)):
        assert torch.equal(result, torch.arange(4.0))
    group.barrier()
    group.close()


@pytest.mark.parametrize("tags", [("kv", "weights")])
def test_allocator(runtime, tags):
    allocator = runtime.allocator()
    before = allocator.stats()
    for tag in tags:
        memory = allocator.reserve(1 << 20, tag)
        assert memory.dtype == torch.uint8 and memory.shape == (1 << 20,)
        assert not memory.any(), "reserved memory is zero"
    assert allocator.stats() == {**before, **dict.fromkeys(tags, 1 << 20)}
    for tag in tags:
        allocator.free(tag)
    assert allocator.stats() == before
