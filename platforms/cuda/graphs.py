"""CUDA graphs over one memory pool. Contract: headrace.platforms.graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from headrace.platforms.batch import HostArgs
from headrace.platforms.graph import Graph, GraphBackend, GraphKey, GraphTraits


class CudaGraph(Graph):
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self, host: HostArgs) -> None:
        self._graph.replay()

    def release(self) -> None:
        self._graph.reset()


class CudaGraphs(GraphBackend):
    """The graphs of a session share a pool: one runs at a time, so one may use the memory of another again."""

    traits = GraphTraits(host_args=False, max_graphs=None, shares_pool=True)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()  # gone with the last graph in it

    def session(self) -> AbstractContextManager[None]:
        return self._session()

    @contextmanager
    def _session(self) -> Iterator[None]:
        # Memory freed by the collector in the middle of a capture would be part of it.
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()
        on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if on:
                gc.enable()

    def capture(self, key: GraphKey, body: Callable[[], None], host: HostArgs) -> Graph:
        """On the current stream, which must not be the default one. Nothing runs: replay it for its results."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        stream = torch.cuda.current_stream()
        if stream == torch.cuda.default_stream(self._device):
            stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            # other threads may use the device meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        return CudaGraph(graph)
