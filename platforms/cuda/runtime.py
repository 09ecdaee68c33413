"""A CUDA device opened in a worker: streams, events, pinned memory, the caching allocator behind tags."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from headrace.platforms.allocator import DeviceAllocator
from headrace.platforms.collectives import Collectives, GroupSpec, SoloCollectives
from headrace.platforms.device import DeviceInfo, DeviceRuntime, Event, MemoryInfo
from headrace.platforms.graph import GraphBackend

if TYPE_CHECKING:
    from headrace.platforms.cuda.graphs import CudaGraphs


class CudaEvent(Event):
    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def record(self, stream: Any = None) -> None:
        self._event.record(stream or torch.cuda.current_stream())

    def synchronize(self) -> None:
        self._event.synchronize()

    def query(self) -> bool:
        return bool(self._event.query())


class CudaAllocator(DeviceAllocator):
    """Tags over torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, list[torch.Tensor]] = {}

    def reserve(self, nbytes: int, tag: str) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        self._held.setdefault(tag, []).append(memory)
        return memory

    def free(self, tag: str) -> None:
        if self._held.pop(tag, None):
            torch.cuda.empty_cache()  # back to the device: others may be waiting for it

    def stats(self) -> dict[str, int]:
        return {tag: sum(part.numel() for part in parts) for tag, parts in self._held.items()}


class CudaRuntime(DeviceRuntime):
    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.device = torch.device("cuda", info.index)
        torch.cuda.set_device(self.device)
        # float32 means float32: by default some products would be rounded to 10 bits of mantissa
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        # long sums stay in float32 from end to end, whatever way the library splits them
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._allocator = CudaAllocator(self.device)
        self._graphs: CudaGraphs | None = None

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def use_stream(self, stream: Any) -> AbstractContextManager[None]:
        return torch.cuda.stream(stream)

    def event(self) -> Event:
        return CudaEvent()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory(self) -> MemoryInfo:
        """What torch holds for reuse counts as free: this process can have it at once."""
        free, total = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return MemoryInfo(free + held, total)

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def collectives(self, group: GroupSpec) -> Collectives:
        if group.world == 1:
            return SoloCollectives()
        from headrace.platforms.cuda.collectives import NcclCollectives

        return NcclCollectives(group, self.device)

    def graphs(self) -> GraphBackend:
        if self._graphs is None:
            from headrace.platforms.cuda.graphs import CudaGraphs

            self._graphs = CudaGraphs(self.device)
        return self._graphs

    def allocator(self) -> DeviceAllocator:
        return self._allocator

    def close(self) -> None:
        self._graphs = None
        self._allocator = CudaAllocator(self.device)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
