"""A CUDA device opened in a worker: torch.cuda behind the shared runtime, its graphs, NCCL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.platforms.allocator import DeviceAllocator
from headrace.platforms.cuda import tuning
from headrace.platforms.device import DeviceInfo
from headrace.platforms.graph import GraphBackend
from headrace.platforms.torch_device.allocator import TorchAllocator
from headrace.platforms.torch_device.runtime import TorchRuntime
from headrace.platforms.torch_device.vmm import CUDA, Driver


class CudaRuntime(TorchRuntime):
    device_type = "cuda"

    def __init__(self, info: DeviceInfo) -> None:
        super().__init__(info)
        # float32 means float32: by default some products would be rounded to 10 bits of mantissa
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        # long sums stay in float32 from end to end, whatever way the library splits them
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def kernel_options(
        self, kernel: str, query: Any, options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return tuning.kernel_options(self.info.features, kernel, query, options)

    def make_allocator(self) -> DeviceAllocator:
        return TorchAllocator(self.device, lambda: Driver(CUDA, self.info.index))

    def make_graphs(self) -> GraphBackend:
        from headrace.platforms.torch_device.graphs import TorchGraphs

        return TorchGraphs(self.device, torch.cuda.CUDAGraph)
