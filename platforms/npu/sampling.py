"""Sampling on the host, for devices that cannot search in a sorted row. Contract: headrace.platforms.ops, "sample"."""

from __future__ import annotations

import torch

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import SampleQuery
from headrace.platforms.reference.sampling import sample


class HostSample:
    """The reference on the CPU. It waits for the logits, so no step is prepared meanwhile."""

    def __init__(self, query: SampleQuery, runtime: DeviceRuntime) -> None:
        pass

    def __call__(self, logits: torch.Tensor, *options: torch.Tensor) -> torch.Tensor:
        ids = sample(logits.cpu(), *(option.cpu() for option in options))
        return ids.to(logits.device)
