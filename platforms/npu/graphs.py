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
from typing import Any

import torch

from headrace.platforms.batch import HostArgs
from headrace.platforms.graph import Graph, GraphBackend, GraphKey, GraphTraits
from headrace.platforms.npu.recorder import Captures, Recorder, Task
from headrace.platforms.torch_device.graphs import TorchGraphs

# A graph takes a stream for each of its parallel parts, and a device has about 2,000; the sizes of 1 to 128 requests
# are 13, well below.
MOST_GRAPHS = 48


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

    def __init__(self, device: torch.device, captures: Captures) -> None:
        self.npu: Any = torch.get_device_module(device)
        self._captures = captures
        self._shared = TorchGraphs(device, self.npu.NPUGraph)
        self._last: Any = None  # recorded behind the last replay
        self.updates = self.npu.Stream(device)

    def session(self) -> AbstractContextManager[None]:
        return self._shared.session()

    def capture(self, key: GraphKey, body: Callable[[], None], host: HostArgs) -> Graph:
        recorder = self._captures.recorder = Recorder(self.npu, host)
        try:
            graph = self._shared.capture(key, body, host)
        finally:
            self._captures.recorder = None
        return NpuGraph(graph, recorder.tasks, self)

    def settle(self) -> None:
        if self._last is not None:
            self._last.synchronize()

    def replayed(self) -> None:
        self._last = self.npu.Event()
        self._last.record(self.npu.current_stream())
