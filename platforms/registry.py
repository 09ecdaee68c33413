"""Implementations, verdicts and the one selector that serves every op. Torch-free and pure.

`supports` answers from plain data, so selection for any device can be computed and tested on any machine.
The order: forced by the user (honoured or an error) > what was measured to be faster on the device > "yes" by rank >
"unverified" by rank > the reference. The unverified must pass a self-test.
Every candidate keeps a row with its reasons, whatever became of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

from headrace.platforms.device import DeviceInfo

Status = Literal["yes", "no", "unverified"]

REFERENCE = "reference"  # name of the plain-PyTorch implementation every op has
MEASURED = "measured faster on this device"
_REFERENCE_ROWS = "headrace.platforms.reference:implementations"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an implementation can serve a query. Reasons are mandatory unless "yes" (then notes)."""

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
    aliases: tuple[str, ...] = ()  # other names under which the same package is distributed


def always(_query: Any, _device: DeviceInfo) -> Verdict:
    """For implementations that run anywhere."""
    return YES


def load_target(target: str) -> Any:
    """The object that "package.module:attribute" names. ImportError when either is not there."""
    module, _, attribute = target.partition(":")
    found = importlib.import_module(module)
    if not hasattr(found, attribute):
        raise ImportError(f"{module} has no {attribute!r}")
    return getattr(found, attribute)


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
    supports: Callable[[Any, DeviceInfo], Verdict] = always
    source: str = "built-in"  # platform or plugin that brought it
    per_query: bool = False  # a function op whose target is called as `target(query, runtime)` to make the function

    def load(self) -> Any:
        """First point that may import vendor libraries."""
        return load_target(self.target)


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

    @classmethod
    def with_reference(cls, implementations: Iterable[Implementation] = ()) -> Registry:
        """A platform's rows and, behind them, the reference for every op it does not bring itself."""
        registry = cls(implementations)
        for row in load_target(_REFERENCE_ROWS)():
            if all(own.name != row.name for own in registry.candidates(row.op)):
                registry.add(row)
        return registry

    def add(self, implementation: Implementation) -> None:
        rows = self._by_op.setdefault(implementation.op, [])
        if any(row.name == implementation.name for row in rows):
            raise ValueError(f"{implementation.op}: {implementation.name} is registered twice")
        rows.append(implementation)

    def candidates(self, op: str) -> list[Implementation]:
        return list(self._by_op.get(op, ()))

    def ops(self) -> list[str]:
        return sorted(self._by_op)


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution without importing it; None when it is not there."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def unmet(requirement: Requirement, versions: Callable[[str], str | None]) -> str | None:
    """Why a requirement is not met, or None."""
    specifier = requirement.specifier
    for name in (requirement.distribution, *requirement.aliases):
        found = versions(name)
        if found is not None:
            break
    else:
        return f"{requirement.distribution}{specifier} is not installed"
    if specifier:
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(specifier).contains(found, prereleases=True):
            return f"{name} {found} is installed, {specifier} is needed"
    return None


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Outcome of running an implementation against the reference on the device."""

    passed: bool
    text: str


@dataclass(slots=True)
class _Row:
    implementation: Implementation
    status: Status
    reasons: tuple[str, ...]

    def refuse(self, reason: str) -> None:
        self.status, self.reasons = "no", (reason, *self.reasons)

    def order(self) -> tuple[int, int]:
        """Sort key, best first. The reference comes last however it is ranked."""
        if self.implementation.name == REFERENCE:
            return (2, 0)
        return (0 if self.status == "yes" else 1, -self.implementation.rank)


def _judge(
    row: Implementation,
    query: Any,
    device: DeviceInfo,
    policy: Policy,
    versions: Callable[[str], str | None],
) -> Verdict:
    for entry in (f"{row.op}={row.name}", row.name):
        if entry in policy.disable:
            return Verdict("no", (f"disabled by {entry!r}",))
    missing = tuple(text for need in row.requires if (text := unmet(need, versions)))
    if missing:
        return Verdict("no", missing)
    try:
        verdict = row.supports(query, device)
    except Exception as error:  # a plugin's mistake must not end the start
        return Verdict("no", (f"supports() failed: {type(error).__name__}: {error}",))
    if verdict.status == "unverified" and policy.only_verified:
        return Verdict("no", ("only verified implementations are allowed", *verdict.reasons))
    return verdict


def select(
    op: str,
    query: Any,
    device: DeviceInfo,
    registry: Registry,
    policy: Policy | None = None,
    *,
    load: Callable[[Implementation], Any] | None = None,
    self_test: Callable[[Implementation], SelfTest] | None = None,
    versions: Callable[[str], str | None] = installed_version,
    test_all: bool = False,
    preferred: str = "",
) -> Decision:
    """Choose the implementation of `op` for `query` on `device`. SelectionError carries the whole table.

    Without `load` nothing is imported and without `self_test` nothing runs: what `explain` does for any device.
    `test_all`: the verified and the reference are tested as well. `preferred`: measured to be faster than those that
    rank above it (platforms.tuned.chosen).
    """
    policy = policy or Policy()
    rows = []
    for candidate in registry.candidates(op):
        verdict = _judge(candidate, query, device, policy, versions)
        measured = (MEASURED,) if candidate.name == preferred and verdict.status != "no" else ()
        rows.append(_Row(candidate, verdict.status, (*measured, *verdict.reasons)))
    forced = policy.force.get(op)
    pool = rows if forced is None else [row for row in rows if row.implementation.name == forced]
    for row in sorted(pool, key=lambda row: (row.implementation.name != preferred, row.order())):
        if row.status != "no" and _admit(row, policy, load, self_test, test_all):
            return Decision(
                op, query, device.spec, row.implementation.name, _table(rows), forced is not None
            )
    raise SelectionError(_failure(op, device, forced, pool, rows), _table(rows))


def _admit(
    row: _Row,
    policy: Policy,
    load: Callable[[Implementation], Any] | None,
    self_test: Callable[[Implementation], SelfTest] | None,
    test_all: bool,
) -> bool:
    """Load and, if unverified, test a winner. A refusal is written into its row."""
    if load is not None:
        try:
            load(row.implementation)
        except (ImportError, OSError) as error:
            row.refuse(f"load failed: {error}")
            return False
    doubted = row.status == "unverified" and row.implementation.name != REFERENCE
    if doubted or test_all:
        if not policy.self_test:
            row.reasons = (*row.reasons, "self-test switched off")
        elif self_test is not None:
            result = self_test(row.implementation)
            if not result.passed:
                row.refuse(f"self-test failed ({result.text})")
                return False
            row.reasons = (*row.reasons, f"self-test passed ({result.text})")
    return True


def _table(rows: Iterable[_Row]) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(row.implementation.name, row.status, row.implementation.rank, row.reasons)
        for row in rows
    )


def _failure(
    op: str, device: DeviceInfo, forced: str | None, pool: list[_Row], rows: list[_Row]
) -> str:
    names = ", ".join(row.implementation.name for row in rows) or "none"
    if forced is not None and not pool:
        return f"{op}: {forced!r} was asked for but does not exist here; there are: {names}"
    why = "; ".join(f"{row.implementation.name}: {', '.join(row.reasons)}" for row in pool)
    if forced is not None:
        return (
            f"{op}: {forced!r} was asked for but cannot serve on {device.spec} ({why}); "
            f"leave the choice open or take one of: {names}"
        )
    return f"{op}: no implementation can serve on {device.spec} ({why or 'none is registered'})"


def policy_problems(policy: Policy, registry: Registry) -> list[str]:
    """Sentences about names in `force` and `disable` that mean nothing here: a flag never does nothing in silence."""
    problems = []
    ops = registry.ops()
    for op, name in policy.force.items():
        known = [row.name for row in registry.candidates(op)]
        if op not in ops:
            problems.append(f"cannot force {op}={name}: no op {op!r}; ops: {', '.join(ops)}")
        elif name not in known:
            problems.append(f"cannot force {op}={name}: {op} has {', '.join(known)}")
    for entry in sorted(policy.disable):
        op, _, name = entry.rpartition("=")
        if not any(
            row.name == name for o in ([op] if op else ops) for row in registry.candidates(o)
        ):
            problems.append(f"cannot disable {entry!r}: no such implementation")
    return problems
