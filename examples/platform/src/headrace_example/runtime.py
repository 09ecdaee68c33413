"""The device opened in a worker: the only way in which the engine touches streams, memory and graphs.

This device computes on the host and in order. Where yours has streams, events or graphs of its own, each method's
contract is in headrace.platforms.device, .graph, .allocator and .collectives; headrace/platforms/cuda is a whole one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from headrace.platforms.allocator import DeviceAllocator
from headrace.platforms.device import DeviceInfo, DeviceRuntime, Event, MemoryInfo
from headrace.platforms.graph import EagerGraphs, GraphBackend
from headrace.platforms.torch_device.collectives import TorchCollectives


class ExampleCollectives(TorchCollectives):
    """Ranks that talk through torch.distributed. A vendor's library has a backend name of its own there."""

    backend = "gloo"
    capture_safe = False  # True where your library's calls may be part of a graph


class ExampleEvent(Event):
    """Everything before it is done when the host gets here."""

    def record(self, stream: Any = None) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


class ExampleAllocator(DeviceAllocator):
    """Weights and KV under tags: what is given back under a tag can be asked for again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, list[torch.Tensor]] = {}

    def reserve(self, nbytes: int, tag: str) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        self._held.setdefault(tag, []).append(memory)
        return memory

    def free(self, tag: str) -> None:
        self._held.pop(tag, None)

    def stats(self) -> dict[str, int]:
        return {tag: sum(part.numel() for part in parts) for tag, parts in self._held.items()}


class ExampleRuntime(DeviceRuntime):
    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.device = torch.device("cpu")  # yours: torch.device("npu", info.index), ...
        self._allocator = ExampleAllocator(self.device)

    def stream(self) -> None:
        return None  # no streams

    def use_stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def event(self) -> Event:
        return ExampleEvent()

    def synchronize(self) -> None:
        return None

    def memory(self) -> MemoryInfo:
        held = sum(self._allocator.stats().values())
        return MemoryInfo(self.info.memory - held, self.info.memory)

    def reset_peak_memory(self) -> None:
        return None

    def peak_memory(self) -> int:
        return 0  # not known: the engine then estimates what a step takes

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def graphs(self) -> GraphBackend:
        return EagerGraphs()  # no graphs: decode steps are run as they are written

    def allocator(self) -> DeviceAllocator:
        return self._allocator

    def close(self) -> None:
        self._allocator = ExampleAllocator(self.device)
