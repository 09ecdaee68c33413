"""An Intel GPU opened in a worker: torch.xpu behind the shared runtime, its graphs, oneCCL, memory without a query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.platforms.device import MemoryInfo
from headrace.platforms.graph import GraphBackend
from headrace.platforms.torch_device.runtime import TorchRuntime
from headrace.platforms.xpu import hardware, tuning


class XpuRuntime(TorchRuntime):
    device_type = "xpu"

    def memory(self) -> MemoryInfo:
        """What torch holds for reuse counts as free: this process can have it at once.

        Drivers of integrated and of some other GPUs answer no query of free memory, by an exception or by zeros.
        What others hold is then not known: of a GPU with memory of its own all that this process did not reserve
        counts as free, of one that shares the machine's at most what the machine has available.
        """
        reserved = self._module.memory_reserved(self.device)
        held = reserved - self._module.memory_allocated(self.device)
        try:
            free, total = self._module.mem_get_info(self.device)
        except (AttributeError, NotImplementedError, RuntimeError):
            free = total = 0
        if total <= 0:
            total = self._module.get_device_properties(self.device).total_memory
            total = total if total > 0 else self.info.memory
            free = max(total - reserved, 0)
        if "integrated" in self.info.features:
            available, installed = hardware.host_memory()
            if installed:
                free, total = min(free, available), min(total, installed)
        return MemoryInfo(free + held, total)

    def kernel_options(
        self, kernel: str, query: Any, options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return tuning.kernel_options(self.info.features, kernel, query, options)

    def make_graphs(self) -> GraphBackend:
        from headrace.platforms.xpu.graphs import NoGraphs, XpuGraphs

        return XpuGraphs(self.device) if hasattr(torch.xpu, "XPUGraph") else NoGraphs()
