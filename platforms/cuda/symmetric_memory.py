"""Small sums in one step over PyTorch's symmetric memory. Contract: headrace.platforms.collectives.

Each rank copies its part where the others can read it and adds all parts itself: one wait instead of the two or more of
a ring, which is what a decode step's sums spend their time on. Multicast is not used (the worker's environment turns it
off): what it needs of switches and drivers cannot be tried without harm to other processes.
"""

from __future__ import annotations

import torch
import torch.distributed._symmetric_memory as symmetric_memory

from headrace.platforms.torch_device.collectives import NcclCollectives

# Beyond it reading every part on every rank moves more bytes than NCCL does.
MOST_BYTES = 512 * 1024
DTYPES = (torch.float32, torch.bfloat16)
# The kernel reads words of this size.
ALIGNMENT = 4  # bytes


class SymmetricMemoryCollectives(NcclCollectives):
    """Sums of up to MOST_BYTES; everything else is NCCL's."""

    def prepare(self) -> None:
        self._name = self._library.group_name
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        for dtype in DTYPES:
            buffer = symmetric_memory.empty(
                MOST_BYTES // dtype.itemsize, dtype=dtype, device=self._device
            )
            symmetric_memory.rendezvous(buffer, self._name)
            self._buffers[dtype] = buffer

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        size = x.numel() * x.element_size()
        if x.dtype not in DTYPES or not 0 < size <= MOST_BYTES or size % ALIGNMENT:
            return super().all_reduce(x)
        # both have to be aligned alike, and the buffer begins at its storage's begin
        x = (
            x.contiguous()
            if not x.storage_offset()
            else x.clone(memory_format=torch.contiguous_format)
        )
        buffer = self._buffers[x.dtype][: x.numel()]
        reduce = torch.ops.symm_mem.one_shot_all_reduce_copy
        total: torch.Tensor = reduce(buffer, x.view(-1), "sum", self._name)
        return total.view(x.shape)

    def close(self) -> None:
        self._buffers = {}
        super().close()
