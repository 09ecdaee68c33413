"""Collectives over oneCCL, by torch's backend "xccl". Contract: headrace.platforms.collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from headrace.platforms.collectives import GroupSpec
from headrace.platforms.torch_device.collectives import TorchCollectives


class XcclCollectives(TorchCollectives):
    capture_safe = False  # oneCCL waits for events of its own, which ends a capture

    def __init__(self, group: GroupSpec, device: torch.device) -> None:
        available = getattr(dist, "is_xccl_available", None)
        if available is None or not available():
            raise RuntimeError(
                "this torch was built without xccl, so several Intel GPUs cannot work together; install the XPU "
                "build of torch 2.8 or later, or leave --tensor-parallel-size at 1"
            )
        super().__init__(group, device, "xccl")
