"""Collectives of a group of several ranks. Each rank runs `check_group` in a process of its own."""

from __future__ import annotations

import torch

from headrace.platforms.collectives import Collectives
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.reference.checks.base import require, same


def check_group(group: Collectives, runtime: DeviceRuntime, rank: int, world: int) -> None:
    """CheckFailed when a rank sees something else than every rank should see."""
    require((group.rank, group.world) == (rank, world), f"rank {group.rank} of {group.world}")
    device = runtime.device
    for name in runtime.info.dtypes:
        dtype = getattr(torch, name)
        parts = [torch.arange(6, dtype=dtype).view(2, 3) + 10 * r for r in range(world)]
        x = parts[rank].to(device)
        total = sum(parts[1:], parts[0])
        same(group.all_reduce(x.clone()), total, f"the sum of {name}")
        same(group.all_reduce(x.clone().t()), total.t(), f"the sum of {name}, a strided tensor")
        for dim in (0, 1, -1):
            same(group.all_gather(x, dim), torch.cat(parts, dim), f"{name} gathered along {dim}")
        strided = torch.cat([part.t() for part in parts], 0)
        same(group.all_gather(x.t(), 0), strided, f"{name} gathered, a strided tensor")
        same(group.broadcast(x.clone(), 1), parts[1], f"{name} of rank 1")
    ids = torch.full((4,), rank, dtype=torch.int64, device=device)
    same(group.broadcast(ids, 0), torch.zeros(4).long(), "ids of rank 0")
    large = torch.full((1 << 20,), float(rank + 1), device=device)
    whole = float(world * (world + 1) // 2)
    same(group.all_reduce(large), torch.full((1 << 20,), whole), "a large sum")
    group.barrier()
