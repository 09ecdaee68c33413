"""AITER's all-reduce: every rank reads the others' memory. Contract: headrace.platforms.collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from headrace.platforms.rocm.aiter import vendor
from headrace.platforms.torch_device.collectives import NcclCollectives

# Beyond it RCCL's rings move fewer bytes. The buffer that parts are copied into is of this size, whatever size the
# package itself would take.
MOST_BYTES = 8 << 20
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes: what its kernel reads at once


class AiterCollectives(NcclCollectives):
    """Sums of up to MOST_BYTES; everything else is RCCL's.

    Within a graph, too, parts are copied into the buffer that all ranks know: what AITER would do instead asks for a
    meeting of the ranks behind every capture.
    """

    def prepare(self) -> None:
        make = vendor.find("CustomAllreduce")
        try:
            # over the default group: handles are exchanged through the hosts
            self._custom = make(dist.group.WORLD, self._device, max_size=MOST_BYTES)
        except SystemExit as error:  # how AITER says that it could not compile
            raise RuntimeError(f"AITER could not build its all-reduce: {error}") from error
        if self._custom.disabled:
            raise RuntimeError("AITER does not offer its all-reduce here; the log says why")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        size = x.numel() * x.element_size()
        if x.dtype in DTYPES and 0 < size <= MOST_BYTES and not size % ALIGNMENT:
            total: torch.Tensor | None = self._custom.custom_all_reduce(x.contiguous())
            if total is not None:
                return total
        return super().all_reduce(x)

    def close(self) -> None:
        custom = self.__dict__.pop("_custom", None)
        if custom is not None:
            custom.close()
        super().close()
