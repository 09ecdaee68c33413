"""NUMA nodes that are told from files, memory that is spread over them, threads that keep to the allowed cores."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from headrace.platforms.cpu.builds import FEATURE
from headrace.platforms.cpu.numa import Placement, nodes_of
from headrace.platforms.cpu.platform import CpuPlatform


def machine(tmp_path, **nodes: tuple[str, int]):
    for name, (cpus, kib) in nodes.items():
        folder = tmp_path / "sys/devices/system/node" / name
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
        (folder / "meminfo").write_text(f"Node 0 MemTotal:  {kib} kB\nNode 0 MemFree: 1 kB\n")
    return tmp_path


def test_nodes_with_allowed_processors_and_memory(tmp_path):
    root = machine(
        tmp_path, node0=("0-3,8-11", 100), node1=("4-7", 100), node2=("", 100), node3=("12", 0)
    )
    assert nodes_of(range(13), root) == [0, 1]  # 2 has no processor, 3 no memory
    assert nodes_of({5}, root) == [1]
    assert nodes_of({9, 1}, root) == [0]
    assert nodes_of(range(4), tmp_path / "nothing") == []


def test_one_node_leaves_memory_alone():
    assert not Placement([0]).spread(np.zeros(1 << 20, np.uint8))
    assert not Placement([]).spread(np.zeros(1 << 20, np.uint8))
    assert not Placement([0, 1]).spread(np.zeros(100, np.uint8))  # less than a page


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' own interface")
def test_the_call_is_the_systems():
    """On one node, interleaving over that node alone is allowed and changes no byte; over missing ones it fails."""
    here = Placement.here()
    if not here.nodes:
        pytest.skip("the system does not tell its nodes")
    memory = np.arange(1 << 16, dtype=np.uint8)
    before = memory.copy()
    alone = Placement(here.nodes[:1])
    alone.nodes = here.nodes[:1] * 2  # as if there were two
    if not alone.spread(memory):
        pytest.skip("mbind is not allowed here")
    assert np.array_equal(memory, before)
    assert not Placement([1022, 1023]).spread(memory)


THREADS = """
import os, pathlib
os.sched_setaffinity(0, {cpus})
from headrace.platforms.cpu.platform import CpuPlatform
device = CpuPlatform.probe()[0]
before = set(os.listdir("/proc/self/task"))
from headrace.platforms.cpu.kernels import Kernels
kernels = Kernels(device.features, 3)
for task in set(os.listdir("/proc/self/task")) - before:
    print(sorted(os.sched_getaffinity(int(task))))
print(device.units)
"""


@pytest.mark.skipif(
    FEATURE not in CpuPlatform.probe()[0].features, reason="the native kernels are not built"
)
def test_pool_threads_keep_to_the_processors_that_are_allowed():
    cpu = min(os.sched_getaffinity(0))
    code = THREADS.format(cpus={cpu})
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    *tasks, units = done.stdout.splitlines()
    assert len(tasks) >= 2 and set(tasks) == {str([cpu])} and units == "1"
