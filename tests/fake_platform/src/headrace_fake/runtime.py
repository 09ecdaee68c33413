"""The fake device opened in a worker: host memory, no streams, and a graph that checks its own rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from headrace.platforms.allocator import DeviceAllocator
from headrace.platforms.batch import HostArgs
from headrace.platforms.collectives import GroupSpec
from headrace.platforms.device import DeviceInfo, DeviceRuntime, Event, MemoryInfo
from headrace.platforms.graph import Graph, GraphBackend, GraphKey, GraphTraits
from headrace.platforms.reference.collectives import HostCollectives


class FakeCollectives(HostCollectives):
    """The host's, through which the runtime learns which rank it is."""

    def __init__(self, group: GroupSpec, runtime: FakeRuntime) -> None:
        super().__init__(group, runtime)
        runtime.rank, runtime.world = group.rank, group.world


class _Event(Event):
    def record(self, stream: Any = None) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


class FakeAllocator(DeviceAllocator):
    def __init__(self) -> None:
        self._held: dict[str, list[torch.Tensor]] = {}

    def reserve(self, nbytes: int, tag: str) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self._held.setdefault(tag, []).append(memory)
        return memory

    def free(self, tag: str) -> None:
        self._held.pop(tag, None)

    def stats(self) -> dict[str, int]:
        return {tag: sum(part.numel() for part in parts) for tag, parts in self._held.items()}


class FakeGraph(Graph):
    def __init__(self, key: GraphKey, body: Callable[[], None]) -> None:
        self._key = key
        self._body = body
        self._released = False

    def replay(self, host: HostArgs) -> None:
        if self._released:
            raise RuntimeError("a released graph was replayed")
        if len(host.seq_lens) != self._key.num_reqs:
            raise RuntimeError(f"host args of {len(host.seq_lens)} requests for {self._key}")
        self._body()

    def release(self) -> None:
        self._released = True


class FakeGraphs(GraphBackend):
    traits = GraphTraits(host_args=True, max_graphs=8, shares_pool=True)

    def __init__(self) -> None:
        self._capturing = False

    @contextmanager
    def session(self) -> Iterator[None]:
        self._capturing = True
        yield
        self._capturing = False

    def capture(self, key: GraphKey, body: Callable[[], None], host: HostArgs) -> Graph:
        if not self._capturing:
            raise RuntimeError("capture outside of a session")
        body()
        return FakeGraph(key, body)


class FakeRuntime(DeviceRuntime):
    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.device = torch.device("cpu")
        self.rank = 0
        self.world = 1
        self.vocab_rows = 0  # of the embedding on this rank; how FakeLinear knows the head
        self._allocator = FakeAllocator()

    def stream(self) -> None:
        return None

    def use_stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def event(self) -> Event:
        return _Event()

    def synchronize(self) -> None:
        return None

    def memory(self) -> MemoryInfo:
        held = sum(self._allocator.stats().values())
        return MemoryInfo(self.info.memory - held, self.info.memory)

    def reset_peak_memory(self) -> None:
        return None

    def peak_memory(self) -> int:
        return 0

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def seed(self, value: int) -> None:
        return None

    def graphs(self) -> GraphBackend:
        return FakeGraphs()

    def allocator(self) -> DeviceAllocator:
        return self._allocator

    def close(self) -> None:
        self._allocator = FakeAllocator()
