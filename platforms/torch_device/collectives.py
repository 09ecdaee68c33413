"""Collectives over a library that torch.distributed knows. Contract: headrace.platforms.collectives."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist

from headrace.platforms.collectives import Collectives, GroupSpec
from headrace.platforms.device import DeviceRuntime

# torch 2.13 gave it another name, and warns of this one
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchCollectives(Collectives):
    """`backend` is torch.distributed's name of the library, which must be safe to capture where graphs are used."""

    backend: ClassVar[str]
    capture_safe = True

    def __init__(self, group: GroupSpec, runtime: DeviceRuntime) -> None:
        self.rank, self.world = group.rank, group.world
        self._device = runtime.device
        # a group beside the default one, whose messages go through the hosts
        own = None if self._device.type == "cpu" else self._device
        self._library: dist.ProcessGroup = dist.new_group(backend=self.backend, device_id=own)
        self._open = True
        try:
            self.barrier()  # the communicator is made by its first use, which must not be inside a capture
            self.prepare()
        except BaseException:
            self.close()
            raise

    def prepare(self) -> None:
        """What a faster way to add up needs besides; the library can be used by then."""
        return None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self._library)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        x = x.contiguous()
        parts = torch.empty((self.world, *x.shape), dtype=x.dtype, device=x.device)
        # flat: libraries differ in which shapes they take
        _gather(parts.view(-1), x.view(-1), group=self._library)
        return torch.cat(parts.unbind(0), dim)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        x = x.contiguous()
        dist.broadcast(x, src, group=self._library)
        return x

    def barrier(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self._device), group=self._library)
        torch.get_device_module(self._device).synchronize(self._device)

    def close(self) -> None:
        if self._open:
            self._open = False
            dist.destroy_process_group(self._library)


class NcclCollectives(TorchCollectives):
    """NCCL; on HIP devices torch has RCCL under that name."""

    backend = "nccl"
