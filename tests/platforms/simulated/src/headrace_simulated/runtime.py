"""The simulated device opened in a worker: streams, events that complete late, graphs of recorded operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from headrace.platforms.allocator import DeviceAllocator
from headrace.platforms.batch import HostArgs
from headrace.platforms.device import DeviceInfo, DeviceRuntime, Event, MemoryInfo
from headrace.platforms.graph import Graph, GraphBackend, GraphKey, GraphTraits
from headrace_simulated import guard
from headrace_simulated.tensors import (
    DEVICE,
    PENDING,
    Recorded,
    SimError,
    poison,
    recording,
)

guard.install()

POLLS = 3  # an event is asked so often before it says that it is complete


class SimStream:
    pass


class SimEvent(Event):
    def __init__(self) -> None:
        self._at = 0
        self._polls = 0

    def record(self, stream: Any = None) -> None:
        self._at, self._polls = PENDING.started, 0

    def synchronize(self) -> None:
        self._polls = POLLS
        PENDING.finish(self._at)

    def query(self) -> bool:
        self._polls += 1
        if self._polls < POLLS:
            return False
        PENDING.finish(self._at)
        return True


class SimAllocator(DeviceAllocator):
    def __init__(self) -> None:
        self._held: dict[str, list[torch.Tensor]] = {}

    def reserve(self, nbytes: int, tag: str) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)
        self._held.setdefault(tag, []).append(memory)
        return memory

    def free(self, tag: str) -> None:
        self._held.pop(tag, None)

    def stats(self) -> dict[str, int]:
        return {tag: sum(part.numel() for part in parts) for tag, parts in self._held.items()}


class SimGraph(Graph):
    """Runs the recorded operators again, on the same memory."""

    def __init__(self, operators: list[Recorded]) -> None:
        self._operators = operators
        self.replays = 0

    def replay(self, host: HostArgs) -> None:
        if not self._operators:
            raise SimError("a released graph was replayed")
        self.replays += 1
        for func, args, kwargs, result in self._operators:
            new = func(*args, **kwargs)
            if _fresh(func):
                for old, now in zip(*(tree_flatten(x)[0] for x in (result, new)), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(now)

    def release(self) -> None:
        self._operators = []


def _fresh(func: Any) -> bool:
    """Whether the operator's results are memory of its own: neither views nor an argument."""
    return all(one.alias_info is None for one in func._schema.returns)


class SimGraphs(GraphBackend):
    traits = GraphTraits(host_args=False, max_graphs=None, shares_pool=True)

    def __init__(self) -> None:
        self._in_session = False
        self.captured: list[SimGraph] = []

    @contextmanager
    def session(self) -> Iterator[None]:
        self._in_session = True
        try:
            yield
        finally:
            self._in_session = False

    def capture(self, key: GraphKey, body: Callable[[], None], host: HostArgs) -> Graph:
        if not self._in_session:
            raise SimError("capture outside of a session")
        with recording() as operators:
            body()
        for func, _, _, result in operators:
            if _fresh(func):  # only a replay computes them
                for value in tree_flatten(result)[0]:
                    if isinstance(value, torch.Tensor):
                        poison(value)
        graph = SimGraph(operators)
        self.captured.append(graph)
        return graph


class SimRuntime(DeviceRuntime):
    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.device = DEVICE
        self._allocator = SimAllocator()
        self._graphs = SimGraphs()

    def stream(self) -> SimStream:
        return SimStream()

    def compile_ahead(self, body: Callable[[], None]) -> None:
        body()

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:  # type: ignore[override]
        if not isinstance(stream, SimStream):
            raise SimError(f"{stream!r} is no stream of this device")
        yield

    def event(self) -> Event:
        return SimEvent()

    def synchronize(self) -> None:
        PENDING.finish()

    def memory(self) -> MemoryInfo:
        held = sum(self._allocator.stats().values())
        return MemoryInfo(self.info.memory - held, self.info.memory)

    def reset_peak_memory(self) -> None:
        return None

    def peak_memory(self) -> int:
        return 0

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty(shape, dtype=dtype)
        poison(memory)
        return memory

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def graphs(self) -> SimGraphs:
        return self._graphs

    def allocator(self) -> DeviceAllocator:
        return self._allocator

    def close(self) -> None:
        PENDING.finish()
        self._allocator = SimAllocator()
