"""Collectives over a library that torch.distributed knows. Contract: headrace.platforms.collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from headrace.platforms.collectives import Collectives, GroupSpec


class TorchCollectives(Collectives):
    """`backend` is torch.distributed's name of the library, which must be safe to capture where graphs are used."""

    capture_safe = True

    def __init__(self, group: GroupSpec, device: torch.device, backend: str) -> None:
        self.rank, self.world = group.rank, group.world
        self._device = device
        dist.init_process_group(
            backend,
            init_method=group.init_method,
            rank=group.rank,
            world_size=group.world,
            device_id=device,
        )
        self._open = True
        self.barrier()  # the communicator is made by its first use, which must not be inside a capture

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        x = x.contiguous()
        parts = torch.empty((self.world, *x.shape), dtype=x.dtype, device=x.device)
        # flat: libraries differ in which shapes they take
        dist.all_gather_into_tensor(parts.view(-1), x.view(-1))
        return torch.cat(parts.unbind(0), dim)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        x = x.contiguous()
        dist.broadcast(x, src)
        return x

    def barrier(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self._device))
        torch.get_device_module(self._device).synchronize(self._device)

    def close(self) -> None:
        if self._open:
            self._open = False
            dist.destroy_process_group()
