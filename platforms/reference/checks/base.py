"""How a check is called, how it fails, and how it says that there is nothing to check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.platforms.device import DeviceRuntime


@dataclass(frozen=True, slots=True)
class Make:
    """Called with a query it makes the op under test; SelectionError when that cannot serve the query."""

    bind: Callable[[Any], Any]
    runtime: DeviceRuntime

    def __call__(self, query: Any) -> Any:
        return self.bind(query)


# A check of one implementation, in one compute dtype.
OpCheck = Callable[[Make, str], None]

# (relative, absolute) between two results of one implementation that should be equal but for the order of sums
CLOSE: Mapping[str, tuple[float, float]] = {
    "float32": (1e-4, 1e-5),
    "bfloat16": (2e-2, 2e-2),
    "float16": (4e-3, 4e-3),
}


class CheckFailed(AssertionError):
    """The text says what is not as the contract says."""


class NothingToCheck(Exception):
    """The text says why: no second block size, no graphs, ..."""


def require(ok: bool, text: str) -> None:
    if not ok:
        raise CheckFailed(text)


def close(got: torch.Tensor, want: torch.Tensor, dtype: str, what: str) -> None:
    """CheckFailed unless the two are equal within CLOSE[dtype]."""
    relative, absolute = CLOSE[dtype]
    got, want = got.cpu().double(), want.cpu().double()
    require(got.shape == want.shape, f"{what}: {tuple(got.shape)} instead of {tuple(want.shape)}")
    off = (got - want).abs()
    within = off <= absolute + relative * want.abs()
    require(bool(within.all()), f"{what}: they differ by up to {float(off.max()):.2g}")


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """CheckFailed unless the two are equal element by element."""
    got, want = got.cpu(), want.cpu()
    require(torch.equal(got, want), f"{what}: they are not equal")
