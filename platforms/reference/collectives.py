"""Collectives through the host: gloo between the ranks' processes, and copies where tensors live on a device.

Slow beside a device's own library, but right wherever PyTorch runs. Contract: headrace.platforms.collectives.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from headrace.platforms.collectives import Collectives, GroupSpec
from headrace.platforms.device import DeviceRuntime

# A rank that lags this far behind is taken for dead; loading and long prefills stay well below.
TIMEOUT = timedelta(minutes=30)


class HostGroup:
    """torch.distributed's default group: a worker process has one rank of one engine."""

    def __init__(self, group: GroupSpec) -> None:
        self._world = group.world
        method, path = group.init_method, group.init_method.removeprefix("file://")
        how: dict[str, Any] = {"init_method": method}
        if path != method:
            self._meeting = _meet(path, group)
            how = {"store": self._meeting}
        dist.init_process_group(
            "gloo", rank=group.rank, world_size=group.world, timeout=TIMEOUT, **how
        )

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        values: list[Any] = [None] * self._world
        dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(path: str, group: GroupSpec) -> dist.TCPStore:
    """A store that answers on this host alone. The file says where: libraries (AITER) that exchange handles through
    the default group's store want one that needs no file."""
    file = dist.FileStore(path, group.world)
    if group.rank:
        port = int(file.get("port"))
        return dist.TCPStore("127.0.0.1", port, group.world, False, timeout=TIMEOUT)
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        port = door.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            group.world,
            True,
            timeout=TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=os.dup(door.fileno()),
        )
    file.set("port", str(port))
    return store


class HostCollectives(Collectives):
    """Over the default group."""

    def __init__(self, group: GroupSpec, runtime: DeviceRuntime) -> None:
        self.rank, self.world = group.rank, group.world

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        there = x.cpu().contiguous()
        dist.all_reduce(there)
        return there.to(x.device)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        there = x.cpu().contiguous()
        parts = [torch.empty_like(there) for _ in range(self.world)]
        dist.all_gather(parts, there)
        return torch.cat(parts, dim=dim).to(x.device)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        there = x.cpu().contiguous()
        dist.broadcast(there, src)
        return there.to(x.device)

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        return None
