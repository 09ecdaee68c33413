"""XPU graphs, where torch has them. Contract: headrace.platforms.graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.platforms.batch import HostArgs
from headrace.platforms.graph import EagerGraphs, Graph, GraphKey, GraphTraits
from headrace.platforms.torch_device.graphs import TorchGraph, TorchGraphs


class XpuGraphs(TorchGraphs):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device, torch.xpu.XPUGraph)

    def capture(self, key: GraphKey, body: Callable[[], None], host: HostArgs) -> Graph:
        """On the current stream: a queue of SYCL has no default that captures exclude. Nothing runs."""
        graph = self._make()
        torch.xpu.synchronize(self._device)
        graph.capture_begin(pool=self._pool)
        try:
            body()
        finally:
            graph.capture_end()
        self._live += 1
        return TorchGraph(graph, self._released)


class NoGraphs(EagerGraphs):
    """For releases of torch without XPUGraph: the engine makes none and launches each step op by op."""

    traits = GraphTraits(host_args=False, max_graphs=0, shares_pool=False)
