"""Opens the collectives of a group of ranks: one choice that all ranks make alike, and a test before the first sum.

A wrong sum gives fluent nonsense, and what makes one (peer access that a host bridge garbles, a library of another
version) is a property of the machine: so every candidate is tested at every start, the verified and the reference too.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from headrace.platforms.collectives import OP, Collectives, GroupSpec, SoloCollectives
from headrace.platforms.device import DeviceInfo, DeviceRuntime
from headrace.platforms.queries import GroupQuery
from headrace.platforms.registry import (
    Candidate,
    Decision,
    Implementation,
    Policy,
    Registry,
    SelectionError,
    SelectionReport,
    SelfTest,
    Verdict,
    load_target,
    select,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

_HOST_GROUP = "headrace.platforms.reference.collectives:HostGroup"
_SELF_TEST = "headrace.platforms.reference.checks.collectives:self_test"
# A library's first start over many devices may take a minute; ranks that wait for each other much longer hang.
PATIENCE = 300.0  # seconds


@contextmanager
def open_group(
    group: GroupSpec,
    runtime: DeviceRuntime,
    registry: Registry,
    policy: Policy | None = None,
    report: SelectionReport | None = None,
) -> Iterator[Collectives]:
    """The group's collectives, closed at the end of the block. Every rank calls it at once.

    SelectionError when no candidate is right on every rank. A candidate that hangs ends the process after a line.
    """
    if group.world == 1:
        yield SoloCollectives()
        return
    host = load_target(_HOST_GROUP)(group)
    try:
        opening = _Opening(host, group, runtime)
        chosen = opening.choose(registry, policy or Policy(), report)
        try:
            yield chosen
        finally:
            chosen.close()
    finally:
        host.close()


class _Opening:
    """One group being opened. What a rank finds wrong counts on all of them, so that all take the same candidate."""

    def __init__(self, host: Any, group: GroupSpec, runtime: DeviceRuntime) -> None:
        self._host = host
        self._group = group
        self._runtime = runtime
        self._query = GroupQuery(group.world, group.same_node)
        self._made: dict[str, Collectives] = {}

    def choose(
        self, registry: Registry, policy: Policy, report: SelectionReport | None
    ) -> Collectives:
        agreed = Registry(self._agreed(registry, policy))
        decision = select(
            OP,
            self._query,
            self._runtime.info,
            agreed,
            policy,
            load=self._load,
            self_test=self._self_test,
            test_all=True,
        )
        if report is not None:
            report.decisions.append(decision)
        if self._group.rank == 0:
            for row in refused(decision):
                reason = f"{row.name} is left out ({row.reasons[0]})"
                log.warning("collectives: %s; %s serves", reason, decision.chosen)
        return self._made[decision.chosen]

    def _agreed(self, registry: Registry, policy: Policy) -> Iterator[Implementation]:
        """The rows with the least favourable verdict of any rank: devices and packages may differ between them."""
        device = self._runtime.info
        try:
            mine = select(OP, self._query, device, registry, policy).candidates
        except SelectionError as error:
            mine = error.candidates
        tables: list[tuple[Candidate, ...]] = self._host.gather(mine)
        for row in registry.candidates(OP):
            ranks = [_of(row.name, table) for table in tables]
            verdict = Verdict("yes", ranks[0].reasons)
            for rank, candidate in enumerate(ranks):
                where = "" if candidate.reasons == ranks[0].reasons else f"rank {rank}: "
                if candidate.status == "no" or (candidate.status, verdict.status) == (
                    "unverified",
                    "yes",
                ):
                    reasons = tuple(where + reason for reason in candidate.reasons)
                    verdict = Verdict(candidate.status, reasons)
                if candidate.status == "no":
                    break
            yield replace(row, requires=(), supports=_always(verdict))

    def _load(self, row: Implementation) -> None:
        def make() -> None:
            self._made[row.name] = target(self._group, self._runtime)

        with _in_time(row.name):
            target = self._together(row.load)
            try:
                self._together(make)
            except ImportError:
                self._drop(row.name)
                raise

    def _self_test(self, row: Implementation) -> SelfTest:
        made, test = self._made[row.name], load_target(_SELF_TEST)
        with _in_time(row.name):
            try:
                said = self._together(lambda: test(made, self._runtime))
            except ImportError as error:
                self._drop(row.name)
                return SelfTest(False, str(error))
        made.capture_safe = all(self._host.gather(made.capture_safe))
        return SelfTest(True, said)

    def _together(self, step: Callable[[], T]) -> T:
        """What `step` gives here, if it gives something on every rank; else ImportError with what went wrong."""
        value, failure = None, ""
        try:
            value = step()
        except Exception as error:  # whatever an untried library throws
            failure = f"{type(error).__name__}: {error}".partition("\n")[0]
        failures: list[str] = self._host.gather(failure)
        if not any(failures):
            return value  # type: ignore[return-value]
        if len(set(failures)) == 1:
            raise ImportError(failure)
        raise ImportError(
            "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text)
        )

    def _drop(self, name: str) -> None:
        made = self._made.pop(name, None)
        if made is not None:
            made.close()


def refused(decision: Decision) -> list[Candidate]:
    """The candidates that should have served and were found wanting: what a person has to hear of."""
    found = ("self-test failed", "load failed")
    return [
        row
        for row in decision.candidates
        if row.status == "no" and row.reasons and row.reasons[0].startswith(found)
    ]


def _of(name: str, table: tuple[Candidate, ...]) -> Candidate:
    missing = Candidate(name, "no", 0, ("it is not installed there",))
    return next((row for row in table if row.name == name), missing)


def _always(verdict: Verdict) -> Callable[[Any, DeviceInfo], Verdict]:
    return lambda query, device: verdict


@contextmanager
def _in_time(name: str) -> Iterator[None]:
    """Ranks that wait for each other inside a library cannot be woken: the process ends, and the engine with it."""

    def give_up() -> None:
        text = f"collectives: {name} did not answer within {PATIENCE:g} s"
        log.critical("%s; start again with --disable collectives=%s", text, name)
        os._exit(1)

    timer = threading.Timer(PATIENCE, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
