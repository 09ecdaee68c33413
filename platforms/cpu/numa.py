"""Memory on machines with several NUMA nodes: large read-only blocks are spread over the nodes whose cores compute.

Threads claim work as they come free, so no thread owns a part of a weight that could lie near it; spread page by page,
every node's memory channels deliver at once. On a machine with one node nothing is done.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection
from pathlib import Path

import numpy as np

# mbind's number; it has no wrapper in the C library
_MBIND = {"x86_64": 237, "aarch64": 235}
_INTERLEAVE, _MOVE = 3, 2  # MPOL_INTERLEAVE, MPOL_MF_MOVE
_PAGE = 4096


def nodes_of(processors: Collection[int], root: Path = Path("/")) -> list[int]:
    """Nodes that hold one of these logical processors and have memory; [] where the system does not tell."""
    found = []
    for folder in sorted(root.glob("sys/devices/system/node/node[0-9]*")):
        try:
            cpus = (folder / "cpulist").read_text()
            memory = (folder / "meminfo").read_text()
        except OSError:
            continue
        words = next((line.split() for line in memory.splitlines() if "MemTotal" in line), [])
        if _members(cpus) & set(processors) and len(words) > 3 and int(words[3]) > 0:
            found.append(int(folder.name.removeprefix("node")))
    return found


def _members(text: str) -> set[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}"""
    members: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            members |= set(range(int(first), int(last or first) + 1))
    return members


class Placement:
    """Where new memory of this process goes. Made once a worker; `spread` is called before memory is written."""

    def __init__(self, nodes: Collection[int]) -> None:
        self.nodes = sorted(nodes)
        self._number = _MBIND.get(platform.machine())

    @classmethod
    def here(cls) -> Placement:
        try:
            return cls(nodes_of(os.sched_getaffinity(0)))
        except (AttributeError, OSError):  # not Linux
            return cls([])

    def spread(self, memory: np.ndarray) -> bool:
        """Interleave the whole pages inside `memory` over the nodes. False where there is nothing to do or it failed:
        the system then places each page where it is first written, which is correct and only slower."""
        if len(self.nodes) < 2 or self._number is None:
            return False
        start = -(-memory.ctypes.data // _PAGE) * _PAGE
        length = (memory.ctypes.data + memory.nbytes) // _PAGE * _PAGE - start
        if length <= 0:
            return False
        words = self.nodes[-1] // 64 + 1
        mask = (ctypes.c_ulong * words)()
        for node in self.nodes:
            mask[node // 64] |= 1 << node % 64
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (start, length, _INTERLEAVE)
        status = libc.syscall(
            ctypes.c_long(self._number),
            *map(ctypes.c_ulong, arguments),
            mask,
            ctypes.c_ulong(words * 64 + 1),
            ctypes.c_ulong(_MOVE),
        )
        return int(status) == 0
