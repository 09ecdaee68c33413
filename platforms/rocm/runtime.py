"""An AMD device opened in a worker: HIP, which PyTorch offers under the names of CUDA, its graphs, RCCL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.platforms.allocator import DeviceAllocator
from headrace.platforms.device import DeviceInfo
from headrace.platforms.graph import GraphBackend
from headrace.platforms.rocm import tuning
from headrace.platforms.torch_device.allocator import TorchAllocator
from headrace.platforms.torch_device.runtime import TorchRuntime
from headrace.platforms.torch_device.vmm import HIP, Driver


class RocmRuntime(TorchRuntime):
    device_type = "cuda"  # the name that a ROCm build of torch has for HIP devices

    def __init__(self, info: DeviceInfo) -> None:
        if not torch.version.hip:
            raise RuntimeError(
                "the installed torch has no HIP; install the ROCm build of torch from the index that pytorch.org names"
            )
        super().__init__(info)
        # float32 means float32 (hipBLASLt has a shorter form on some devices), and long sums stay in it
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def kernel_options(
        self, kernel: str, query: Any, options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return tuning.kernel_options(self.info.features, kernel, query, options)

    def make_allocator(self) -> DeviceAllocator:
        return TorchAllocator(self.device, lambda: Driver(HIP, self.info.index))

    def make_graphs(self) -> GraphBackend:
        from headrace.platforms.torch_device.graphs import TorchGraphs

        return TorchGraphs(self.device, torch.cuda.CUDAGraph)
