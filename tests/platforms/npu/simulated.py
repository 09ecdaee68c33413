"""A stand-in for the module `torch.npu` on the CPU: streams, events, graphs with task groups that can be updated.

A graph keeps the operators that its body called, as ACL keeps tasks. `replay` runs them in order up to the first event
that nobody has recorded; recording it lets them go on, as a second stream does on a device. Within an update an
operator is not run: it takes the place of the task that the handle names. What the module is told is written into
`log`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.platforms.npu import attention, runtime
from headrace.platforms.npu.runtime import NpuRuntime

_LIKE_ITEM = ("_local_scalar_dense",)


@dataclass
class Call:
    func: Any
    args: Any
    kwargs: Any
    results: Any


@dataclass
class Wait:
    event: Any


class _Keep(TorchDispatchMode):
    """Runs what is called and keeps it."""

    def __init__(self, graph: Any) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not func.__name__.startswith(_LIKE_ITEM), "a capture may not wait for the device"
        results = func(*args, **(kwargs or {}))
        self._graph.tasks.append(Call(func, args, kwargs or {}, results))
        return results


class _Rewrite(TorchDispatchMode):
    """Runs nothing: what is called takes the place of the group's tasks."""

    def __init__(self, group: list[Call]) -> None:
        super().__init__()
        self._group, self.seen = group, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        task = self._group[self.seen]
        self.seen += 1
        assert func is task.func, "an update must make the tasks that were captured"
        given = [x.data_ptr() for x in args if isinstance(x, torch.Tensor)]
        had = [x.data_ptr() for x in task.args if isinstance(x, torch.Tensor)]
        assert given == had, "an update may not change addresses"
        task.args, task.kwargs = args, kwargs or {}
        return task.results


class Stream:
    def __init__(self, npu: SimulatedNpu, name: str = "side") -> None:
        self._npu, self.name = npu, name

    def synchronize(self) -> None:
        self._npu.log.append(("synchronize stream", self.name))


class Event:
    def __init__(self, npu: SimulatedNpu) -> None:
        self._npu = npu
        self._graphs: list[Any] = []

    def record(self, stream: Any = None) -> None:
        self._graphs = list(self._npu.running)

    def synchronize(self) -> None:
        self._npu.log.append(("synchronize",))
        assert not [graph for graph in self._graphs if graph in self._npu.running], "would hang"

    def query(self) -> bool:
        return True


class ExternalEvent:
    """One that a graph waits for and work outside of it records."""

    def __init__(self, npu: SimulatedNpu) -> None:
        self._npu = npu
        self.recorded = False

    def wait(self, stream: Any) -> None:
        self._npu.capturing.tasks.append(Wait(self))

    def reset(self, stream: Any) -> None:
        pass  # part of the wait here

    def record(self, stream: Any) -> None:
        self._npu.log.append(("event", stream.name))
        assert not self.recorded, "recorded twice before anybody waited for it"
        self.recorded = True
        for graph in list(self._npu.running):
            graph.go_on()


class NPUGraph:
    def __init__(self, npu: SimulatedNpu) -> None:
        self._npu = npu
        self.tasks: list[Any] = []
        self._at = 0
        self._mode: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert self._npu.current_stream() is not self._npu.default_stream(), "not on this stream"
        assert pool is not None and capture_error_mode == "thread_local"
        self._npu.capturing = self
        self._mode = _Keep(self)
        self._mode.__enter__()

    def capture_end(self) -> None:
        self._mode.__exit__(None, None, None)
        self._npu.capturing = None

    def replay(self) -> None:
        self._npu.log.append(("replay",))
        assert self not in self._npu.running, "it still runs"
        self._npu.running.append(self)
        self._at = 0
        self.go_on()

    def go_on(self) -> None:
        while self._at < len(self.tasks):
            task = self.tasks[self._at]
            if isinstance(task, Wait):
                if not task.event.recorded:
                    return
                task.event.recorded = False
            else:
                _run(task)
            self._at += 1
        self._npu.running.remove(self)

    def reset(self) -> None:
        self.tasks = []


def _run(task: Call) -> None:
    results = task.func(*task.args, **task.kwargs)
    for old, new in zip(_tensors(task.results), _tensors(results), strict=True):
        if old.data_ptr() != new.data_ptr():  # else a view, or written in place: there already
            old.copy_(new)


def _tensors(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    if isinstance(results, list | tuple):
        return [tensor for result in results for tensor in _tensors(result)]
    return []


@dataclass
class SimulatedNpu:
    """What of `torch.npu` the platform uses."""

    log: list[tuple[Any, ...]] = field(default_factory=list)
    running: list[NPUGraph] = field(default_factory=list)  # replays that wait for an event
    capturing: Any = None
    config: Any = field(default_factory=SimpleNamespace)

    def __post_init__(self) -> None:
        self._default = Stream(self, "default")
        self._current = [self._default]
        self._group_from = 0
        self._rewrite: Any = None

    def Stream(self, device: Any = None) -> Stream:
        return Stream(self)

    def Event(self) -> Event:
        return Event(self)

    def ExternalEvent(self) -> ExternalEvent:
        return ExternalEvent(self)

    def NPUGraph(self) -> NPUGraph:
        return NPUGraph(self)

    def graph_pool_handle(self) -> object:
        return object()

    def current_stream(self) -> Stream:
        return self._current[-1]

    def default_stream(self, device: Any = None) -> Stream:
        return self._default

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def graph_task_group_begin(self, stream: Stream) -> None:
        assert stream is self.current_stream()
        self._group_from = len(self.capturing.tasks)

    def graph_task_group_end(self, stream: Stream) -> list[Any]:
        group: list[Any] = self.capturing.tasks[self._group_from :]
        assert group, "a group without a task"
        return group

    def graph_task_update_begin(self, stream: Stream, handle: list[Any]) -> None:
        assert self.capturing is None and stream is self.current_stream()
        self.log.append(("update", stream.name))
        self._rewrite = _Rewrite(handle)
        self._rewrite.__enter__()

    def graph_task_update_end(self, stream: Stream) -> None:
        self._rewrite.__exit__(None, None, None)
        assert self._rewrite.seen == len(self._rewrite._group), "some tasks were not updated"

    def set_device(self, device: Any) -> None: ...

    def set_compile_mode(self, jit_compile: bool = False) -> None:
        assert not jit_compile

    def synchronize(self, device: Any = None) -> None:
        assert not self.running, "would hang"

    def empty_cache(self) -> None: ...

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 8 << 30, 16 << 30

    def memory_reserved(self, device: Any = None) -> int:
        return 0

    memory_allocated = max_memory_allocated = memory_reserved

    def reset_peak_memory_stats(self, device: Any = None) -> None: ...


class SimulatedRuntime(NpuRuntime):
    """The platform's runtime over the stand-in: tensors lie on the CPU."""

    device_type = "cpu"

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)  # there is no device that memory could be pinned for


def simulate(monkeypatch: Any) -> SimulatedNpu:
    """Put the stand-in where the platform looks for the module."""
    npu = SimulatedNpu()

    @wraps(torch.get_device_module)  # PyTorch looks at what it wraps
    def module(device: Any = None) -> Any:
        return npu

    monkeypatch.setattr(torch, "get_device_module", module)
    monkeypatch.setattr(runtime, "register", lambda: None)
    monkeypatch.setattr(attention, "borrowed", lambda tensor: tensor)
    return npu
