"""The reference's sampling, which may be part of a captured step: it never waits for the host."""

from __future__ import annotations

from typing import Any

import torch

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import SampleQuery
from headrace.platforms.reference.sampling import sample


class SimSample:
    def __init__(self, query: SampleQuery, runtime: DeviceRuntime) -> None:
        self.query = query

    def __call__(self, logits: torch.Tensor, *options: torch.Tensor) -> torch.Tensor:
        return sample(logits, *options)

    def guarded(self, logits: torch.Tensor, *options: Any) -> torch.Tensor:
        ids = sample(logits, *options[:-1])
        return torch.where(logits.sum(-1).isfinite(), ids, -1).to(torch.int32)
