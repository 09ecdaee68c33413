"""ACL graphs, whose host arguments are updated at every replay. Contract: headrace.platforms.graph.

An op that takes lengths as host integers has them in the task that it launches. So it is captured as a task group
behind an event: a replay runs up to the event, a second stream launches the op again with the new integers, which
rewrites the task instead of running it, and records the event.

Sources: torch_npu/npu/graphs.py, and CANN's documentation of aclmdlRICaptureTaskGrpBegin and
aclmdlRICaptureTaskUpdateBegin (driver 25.0 and later).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.platforms.batch import HostArgs
from headrace.platforms.graph import Graph, GraphBackend, GraphKey, GraphTraits
from headrace.platforms.npu.runtime import NpuRuntime
from headrace.platforms.torch_device.graphs import TorchGraphs

# A graph takes a stream for each of its parallel parts, and a device has about 2,000; the sizes of 1 to 128 requests
# are 13, well below.
MOST_GRAPHS = 48

Launch = Callable[[HostArgs], None]


@dataclass(frozen=True, slots=True)
class Task:
    """A captured launch that a replay updates."""

    event: Any
    handle: Any
    launch: Launch


@dataclass(slots=True)
class Recorder:
    """The capture under way: ops hand it what they launch with host integers."""

    npu: Any  # torch.npu
    host: HostArgs
    tasks: list[Task] = field(default_factory=list)

    def launch(self, launch: Launch) -> None:
        """Capture `launch(host)` as a group of tasks. Every call of it must make the same tasks, with the same tensors:
        it may hold none that the graph's memory has to outlive, see `borrowed`."""
        npu = self.npu
        stream = npu.current_stream()
        event = npu.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        npu.graph_task_group_begin(stream)
        launch(self.host)
        self.tasks.append(Task(event, npu.graph_task_group_end(stream), launch))


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a hold on it: within a graph memory is used again by what comes later."""
    import torch_npu

    same: torch.Tensor = torch_npu._C._weak_ref_tensor(tensor)
    return same


class NpuGraph(Graph):
    def __init__(self, graph: Graph, tasks: list[Task], backend: NpuGraphs) -> None:
        self._graph, self._tasks, self._backend = graph, tasks, backend

    def replay(self, host: HostArgs) -> None:
        """Waits for the replay before it: a task must not be rewritten, nor its event recorded, while it may still be
        run. Everything behind the graph (sampling, copies) goes on meanwhile."""
        backend, npu = self._backend, self._backend.npu
        backend.settle()
        self._graph.replay(host)
        stream = backend.updates
        with npu.stream(stream):
            for task in self._tasks:
                npu.graph_task_update_begin(stream, task.handle)
                task.launch(host)
                npu.graph_task_update_end(stream)
                task.event.record(stream)
        backend.replayed()

    def release(self) -> None:
        self._backend.settle()
        self._tasks.clear()
        self._graph.release()


class NpuGraphs(GraphBackend):
    """The graphs of a session share a pool, as CUDA's do; they also share the stream of updates."""

    traits = GraphTraits(host_args=True, max_graphs=MOST_GRAPHS, shares_pool=True)

    def __init__(self, runtime: NpuRuntime) -> None:
        self.npu: Any = torch.get_device_module(runtime.device)
        self._runtime = runtime
        self._shared = TorchGraphs(runtime.device, self.npu.NPUGraph)
        self._last: Any = None  # recorded behind the last replay
        self.updates = self.npu.Stream(runtime.device)

    def session(self) -> AbstractContextManager[None]:
        return self._shared.session()

    def capture(self, key: GraphKey, body: Callable[[], None], host: HostArgs) -> Graph:
        recorder = self._runtime.recorder = Recorder(self.npu, host)
        try:
            graph = self._shared.capture(key, body, host)
        finally:
            self._runtime.recorder = None
        return NpuGraph(graph, recorder.tasks, self)

    def settle(self) -> None:
        if self._last is not None:
            self._last.synchronize()

    def replayed(self) -> None:
        self._last = self.npu.Event()
        self._last.record(self.npu.current_stream())
