"""Collectives over oneCCL, by torch's backend "xccl". Contract: headrace.platforms.collectives."""

from __future__ import annotations

import torch.distributed as dist

from headrace.platforms.collectives import GroupSpec
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.torch_device.collectives import TorchCollectives


class XcclCollectives(TorchCollectives):
    backend = "xccl"
    capture_safe = False  # oneCCL waits for events of its own, which ends a capture

    def __init__(self, group: GroupSpec, runtime: DeviceRuntime) -> None:
        available = getattr(dist, "is_xccl_available", None)
        if available is None or not available():
            raise ImportError(
                "this torch was built without xccl; install the XPU build of torch 2.8 or later"
            )
        super().__init__(group, runtime)
