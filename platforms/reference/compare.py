"""An implementation against the reference on a contract's generated cases: the self-test, the contract tests and
`headrace conformance`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.platforms.ops import Case, OpContract, Tolerance
from headrace.platforms.registry import load_target

# Kernels on stored blocks may round activations to 8 bits as well: half a percent of the results' spread, which is
# about 1, and several times that for the largest of thousands. A wrong scale or order is off by the spread itself.
EIGHT_BITS = 0.1


@dataclass(frozen=True, slots=True)
class Comparison:
    within: bool  # every result of every case is within tolerance
    largest: float  # largest absolute difference seen
    case: str = ""  # first case that is not within
    excess: float = 0.0  # largest difference as a multiple of the tolerance; inf where shape, dtype or NaN differ


def compare(
    contract: OpContract,
    query: Any,
    candidate: Any,
    reference: Any,
    device: torch.device,
    seed: int = 0,
) -> Comparison:
    """Run both on the contract's generated cases."""
    tolerance = tolerance_of(contract, query)
    largest, excess, failed = 0.0, 0.0, ""
    for case in cases_of(contract, query, device, seed):
        error, over = measure(case.run(candidate), case.run(reference), tolerance)
        largest = error if error != error else max(largest, error)
        excess = max(excess, over)
        if over > 1.0:
            failed = failed or case.name
    return Comparison(not failed, largest, failed, excess)


def cases_of(contract: OpContract, query: Any, device: torch.device, seed: int = 0) -> list[Case]:
    """The generated cases. Their inputs are drawn on the host: equal on every device."""
    made: list[Case] = load_target(contract.cases)(query, device, seed)
    return made


def truth_query(contract: OpContract, query: Any) -> Any:
    """The query that the reference answers in its place: the same with weights in plain numbers, if they are stored."""
    stored = getattr(query, "scheme", "") in contract.stored
    return replace(query, scheme="") if stored else query


def tolerance_of(contract: OpContract, query: Any) -> Tolerance:
    relative, absolute = contract.tolerance[getattr(query, "dtype", "float32")]
    if getattr(query, "scheme", "") in contract.stored:
        absolute = max(absolute, EIGHT_BITS)
    return relative, absolute


def measure(
    got: Iterable[torch.Tensor], want: Iterable[torch.Tensor], tolerance: Tolerance
) -> tuple[float, float]:
    """(largest absolute difference, the largest as a multiple of what the tolerance allows there).

    More than 1 is a failure; inf where shapes, dtypes or NaN differ. Compared on the host: not every device has
    float64.
    """
    relative, absolute = tolerance
    largest = excess = 0.0
    for ours, truth in zip(got, want, strict=True):
        if ours.shape != truth.shape or ours.dtype != truth.dtype:
            return largest, math.inf
        if not ours.numel():
            continue
        exact = truth.cpu().double()
        difference = (ours.cpu().double() - exact).abs()
        allowed = absolute + relative * exact.abs()
        ratio = torch.where(difference == 0, 0.0, difference / allowed)
        worst, over = float(difference.max()), float(ratio.nan_to_num(math.inf, math.inf).max())
        largest = worst if worst != worst else max(largest, worst)
        excess = max(excess, over)
    return largest, excess
