"""Collectives between worker processes of one host over gloo."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from headrace.platforms.collectives import Collectives, GroupSpec

# A rank that lags this far behind is taken for dead; loading and long prefills stay well below.
TIMEOUT = timedelta(minutes=30)


class GlooCollectives(Collectives):
    """The process's one group: a worker process has one rank of one engine."""

    def __init__(self, group: GroupSpec) -> None:
        self.rank = group.rank
        self.world = group.world
        dist.init_process_group(
            "gloo",
            init_method=group.init_method,
            rank=group.rank,
            world_size=group.world,
            timeout=TIMEOUT,
        )
        self._open = True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.world)
        ]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=dim)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        dist.broadcast(x, src)
        return x

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        if self._open:
            self._open = False
            dist.destroy_process_group()
