"""Sampling for devices without float64. Contract: headrace.platforms.ops, "sample"."""

from __future__ import annotations

import torch

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import SampleQuery
from headrace.platforms.reference.sampling import sample


class HostSample:
    """The reference on the host. Waits for the device, so steps do not overlap with what comes after them."""

    def __init__(self, query: SampleQuery, runtime: DeviceRuntime) -> None:
        self._device = runtime.device

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """As the contract: logits, temperature, top_k, top_p, min_p, uniform -> ids [R] int64."""
        return sample(*(tensor.cpu() for tensor in inputs)).to(self._device)
