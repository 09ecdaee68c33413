"""Collectives: two processes over gloo, and the group of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from headrace.platforms.collectives import GroupSpec, SoloCollectives

RANK = """
import sys
from headrace.platforms.collectives import GroupSpec
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.reference.checks.collectives import check_group

rank, world = int(sys.argv[1]), int(sys.argv[2])
platform = CpuPlatform()
runtime = platform.open(platform.probe()[0])
group = runtime.collectives(GroupSpec(rank, world, "file://" + sys.argv[3]))
check_group(group, runtime, rank, world)
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
