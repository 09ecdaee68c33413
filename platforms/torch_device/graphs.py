"""Graphs over one memory pool. Contract: headrace.platforms.graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from headrace.platforms.batch import HostArgs
from headrace.platforms.graph import Graph, GraphBackend, GraphKey, GraphTraits

# A graph of some 600 kernels takes less.
GRAPH_BYTES = 8 << 20


class TorchGraph(Graph):
    def __init__(self, graph: Any, gone: Callable[[], None]) -> None:
        self._graph, self._gone = graph, gone

    def replay(self, host: HostArgs) -> None:
        self._graph.replay()

    def release(self) -> None:
        self._graph.reset()
        self._gone()


class TorchGraphs(GraphBackend):
    """All graphs share a pool: one runs at a time, so one may use the memory of another again.

    `make` makes an empty graph, with the methods of PyTorch's class of CUDA graphs.
    """

    traits = GraphTraits(
        host_args=False, max_graphs=None, shares_pool=True, graph_bytes=GRAPH_BYTES
    )

    def __init__(self, device: torch.device, make: Callable[[], Any]) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._make = make
        self._pool: Any = None  # gone with the last graph in it
        self._live = 0

    def session(self) -> AbstractContextManager[None]:
        return self._session()

    @contextmanager
    def _session(self) -> Iterator[None]:
        if not self._live:
            self._module.synchronize(self._device)
            self._module.empty_cache()  # the pool takes nothing that is kept for reuse
            self._pool = self._module.graph_pool_handle()
        # Memory freed by the collector in the middle of a capture would be part of it.
        on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if on:
                gc.enable()

    def capture(self, key: GraphKey, body: Callable[[], None], host: HostArgs) -> Graph:
        """On the current stream, which must not be the default one. Nothing runs: replay it for its results."""
        graph, module = self._make(), self._module
        module.synchronize(self._device)
        stream = module.current_stream()
        if stream == module.default_stream(self._device):
            stream = module.Stream(self._device)
        with module.stream(stream):
            # other threads may use the device meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        self._live += 1
        return TorchGraph(graph, self._released)

    def _released(self) -> None:
        self._live -= 1
