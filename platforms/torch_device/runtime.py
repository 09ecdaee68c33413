"""A device opened in a worker through its module of PyTorch: streams, events, pinned memory.
Contract: headrace.platforms.device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from headrace.platforms.allocator import DeviceAllocator
from headrace.platforms.device import DeviceInfo, DeviceRuntime, Event, MemoryInfo
from headrace.platforms.graph import GraphBackend
from headrace.platforms.torch_device.allocator import TorchAllocator


class TorchEvent(Event):
    def __init__(self, module: Any) -> None:
        self._module = module
        self._event = module.Event()

    def record(self, stream: Any = None) -> None:
        self._event.record(stream or self._module.current_stream())

    def synchronize(self) -> None:
        self._event.synchronize()

    def query(self) -> bool:
        return bool(self._event.query())


class TorchRuntime(DeviceRuntime):
    """What is left to a platform: the type of its torch devices, its graphs."""

    device_type: ClassVar[str]

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.device = torch.device(self.device_type, info.index)
        self._module: Any = torch.get_device_module(self.device)
        self._module.set_device(self.device)
        self._allocator = self.make_allocator()
        self._graphs: GraphBackend | None = None

    @abstractmethod
    def make_graphs(self) -> GraphBackend: ...

    def make_allocator(self) -> DeviceAllocator:
        return TorchAllocator(self.device)

    def stream(self) -> Any:
        return self._module.Stream(self.device)

    def enter_thread(self) -> None:
        self._module.set_device(self.device)

    def compile_ahead(self, body: Callable[[], None]) -> None:
        try:
            from headrace.platforms.triton.ahead import compile_ahead
        except ImportError:  # no Triton
            return
        compile_ahead(body)

    def use_stream(self, stream: Any) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._module.stream(stream)
        return context

    def event(self) -> Event:
        return TorchEvent(self._module)

    def synchronize(self) -> None:
        self._module.synchronize(self.device)

    def memory(self) -> MemoryInfo:
        """What torch holds for reuse counts as free: this process can have it at once."""
        free, total = self._module.mem_get_info(self.device)
        held = self._module.memory_reserved(self.device)
        held -= self._module.memory_allocated(self.device)
        return MemoryInfo(free + held, total)

    def reset_peak_memory(self) -> None:
        self._module.reset_peak_memory_stats(self.device)

    def peak_memory(self) -> int:
        return int(self._module.max_memory_allocated(self.device))

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def graphs(self) -> GraphBackend:
        if self._graphs is None:
            self._graphs = self.make_graphs()
        return self._graphs

    def allocator(self) -> DeviceAllocator:
        return self._allocator

    def profiler_activity(self) -> Any:
        return getattr(torch.profiler.ProfilerActivity, self.device_type.upper(), None)

    def close(self) -> None:
        self._graphs = None
        for tag in self._allocator.stats():
            self._allocator.free(tag)
        self._allocator = self.make_allocator()
        self._module.synchronize(self.device)
        self._module.empty_cache()
