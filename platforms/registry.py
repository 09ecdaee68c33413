"""Implementations, verdicts and the one selector that serves every op. Torch-free and pure.

`supports` answers from plain data, so selection for any device can be computed and tested on any machine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.platforms.device import DeviceInfo

Status = Literal["yes", "no", "unverified"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an implementation can serve a query. Reasons are mandatory unless "yes" (then they are notes)."""

    status: Status
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.status != "yes" and not self.reasons:
            raise ValueError(f"a verdict of {self.status!r} needs a reason")


YES = Verdict("yes")


class Check:
    """Collects every unmet need, not only the first: `Check().need(cond, "why not").verdict()`."""

    def __init__(self) -> None:
        self._unmet: list[str] = []
        self._doubts: list[str] = []
        self._notes: list[str] = []

    def need(self, ok: bool, reason: str) -> Check:
        if not ok:
            self._unmet.append(reason)
        return self

    def doubt(self, reason: str) -> Check:
        """Mark as unverified: believed to work, never run on this hardware by the project."""
        self._doubts.append(reason)
        return self

    def note(self, text: str) -> Check:
        self._notes.append(text)
        return self

    def verdict(self) -> Verdict:
        if self._unmet:
            return Verdict("no", tuple(self._unmet))
        if self._doubts:
            return Verdict("unverified", tuple(self._doubts + self._notes))
        return Verdict("yes", tuple(self._notes))


@dataclass(frozen=True, slots=True)
class Requirement:
    """A distribution that must be installed, e.g. Requirement("flashinfer-python", ">=0.5")."""

    distribution: str
    specifier: str = ""


def _always(_query: Any, _device: DeviceInfo) -> Verdict:
    return YES


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run one op: metadata plus where its code is ("package.module:attribute").

    Function ops: the attribute is the function itself. Class ops (linear, paged_attention, ...):
    the attribute is called as `cls(query, runtime)` once for each query.
    """

    op: str
    name: str
    target: str
    rank: int = 0  # higher wins among equals in status; the reference has rank 0
    requires: tuple[Requirement, ...] = ()
    supports: Callable[[Any, DeviceInfo], Verdict] = _always
    source: str = "built-in"  # platform or plugin that brought it

    def load(self) -> Any:
        """First point that may import vendor libraries."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One row of a decision's table."""

    name: str
    status: Status
    rank: int
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen for (op, query) on a device, and why not the others."""

    op: str
    query: Any
    device: str
    chosen: str
    candidates: tuple[Candidate, ...]
    forced: bool = False


class SelectionError(RuntimeError):
    """No candidate, or the forced one cannot serve. Carries the whole table and the way out."""

    def __init__(self, message: str, candidates: tuple[Candidate, ...]) -> None:
        super().__init__(message)
        self.candidates = candidates


@dataclass(slots=True)
class SelectionReport:
    """Every decision of this start, in the order they were made; equal (op, query) pairs once."""

    decisions: list[Decision] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Policy:
    """What the user said about selection."""

    force: Mapping[str, str] = field(default_factory=dict)  # op -> implementation
    disable: frozenset[str] = frozenset()  # "op=name" or "name"
    only_verified: bool = False
    self_test: bool = True


class Registry:
    """All implementations of a platform, its plugins and the reference."""

    def __init__(self, implementations: Iterable[Implementation] = ()) -> None:
        self._by_op: dict[str, list[Implementation]] = {}
        for implementation in implementations:
            self.add(implementation)

    def add(self, implementation: Implementation) -> None:
        rows = self._by_op.setdefault(implementation.op, [])
        if any(row.name == implementation.name for row in rows):
            raise ValueError(f"{implementation.op}: {implementation.name} is registered twice")
        rows.append(implementation)

    def candidates(self, op: str) -> list[Implementation]:
        return list(self._by_op.get(op, ()))

    def ops(self) -> list[str]:
        return sorted(self._by_op)
