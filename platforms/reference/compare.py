"""An implementation against the reference on a contract's generated cases: the self-test and the contract tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.platforms.ops import OpContract
from headrace.platforms.registry import load_target


@dataclass(frozen=True, slots=True)
class Comparison:
    within: bool  # every result of every case is within tolerance
    largest: float  # largest absolute difference seen
    case: str = ""  # first case that is not within


def compare(
    contract: OpContract,
    query: Any,
    candidate: Any,
    reference: Any,
    device: torch.device,
    seed: int = 0,
) -> Comparison:
    """Run both on the contract's generated cases."""
    relative, absolute = contract.tolerance[getattr(query, "dtype", "float32")]
    largest, failed = 0.0, ""
    for case in load_target(contract.cases)(query, device, seed):
        for got, want in zip(case.run(candidate), case.run(reference), strict=True):
            difference = (got.double() - want.double()).abs()
            bad = ~(difference <= absolute + relative * want.double().abs())
            if got.shape != want.shape or got.dtype != want.dtype or bool(bad.any()):
                failed = failed or case.name
            worst = float(difference.max()) if difference.numel() else 0.0
            largest = worst if worst != worst else max(largest, worst)
    return Comparison(not failed, largest, failed)
