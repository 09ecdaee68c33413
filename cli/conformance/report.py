"""What a conformance run found: JSON that a user can send back, and a table that a person reads. Torch-free."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.bench.record import record
from headrace.cli.conformance.messages import Case, Result, Test
from headrace.cli.errors import CliError
from headrace.platforms.collectives import OP as COLLECTIVES
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.probe import ResolvedPlatform
from headrace.platforms.queries import GroupQuery
from headrace.platforms.reference.queries import queries
from headrace.platforms.registry import (
    Implementation,
    SelectionError,
    installed_version,
    select,
)

SCHEMA = 1
SAVE_SECONDS = 5.0  # between two writes of the file while tests run
STYLE = {"yes": "green", "unverified": "yellow", "no": "red"}


@dataclass
class Row:
    """One implementation of one op, or one area of the runtime."""

    op: str
    implementation: str
    verdict: str = ""
    reasons: tuple[str, ...] = ()
    passed: int = 0  # cases
    failed: int = 0
    skipped: int = 0  # tests
    excess: float = -1.0  # largest error as a multiple of the tolerance; -1 = none was measured
    failure: str = ""  # the first
    why_skipped: dict[str, None] = field(default_factory=dict)

    def add(self, test: Test, result: Result) -> None:
        if result.status == "skipped":
            self.skipped += 1
            self.why_skipped[result.text] = None
            return
        good = sum(case.passed for case in result.cases)
        self.passed += good
        self.failed += max(len(result.cases) - good, result.status == "failed")
        self.excess = max([self.excess, *(case.excess for case in result.cases)])
        if result.status == "failed" and not self.failure:
            self.failure = f"{test.text}: {result.text}"

    def plain(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "implementation": self.implementation,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "passed": self.passed,
            "failed": self.failed,
            "skipped": self.skipped,
            "largest_error_over_tolerance": number(self.excess),
            "first_failure": self.failure,
        }


class Report:
    """Grows result by result. `file`: where it is kept, "" = nowhere; written now and then and at the end."""

    def __init__(self, found: ResolvedPlatform, only: Sequence[str], file: str) -> None:
        self._found, self._file = found, file
        self._saved = 0.0
        self._begun = time.monotonic()
        self._head = record("conformance", {"device": found.device.spec, "only": list(only)}, [])
        self._head["versions"] |= _versions(found)
        self._results: list[dict[str, Any]] = []
        self._rows: dict[tuple[str, str], Row] = {}
        self._expected = 0
        self._complete = False

    @property
    def failed(self) -> int:
        return sum(row.failed for row in self._rows.values())

    def expect(self, tests: Sequence[Test]) -> None:
        """All tests of the run, known once the first process has started."""
        self._expected = len(tests)
        for test in tests:
            key = test.area, test.implementation
            if key not in self._rows:
                verdict, reasons = self._verdict(*key)
                self._rows[key] = Row(*key, verdict, reasons)

    def add(self, test: Test, result: Result) -> None:
        self._rows[test.area, test.implementation].add(test, result)
        self._results.append(_plain(test, result))
        if time.monotonic() > self._saved + SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Whole or not at all: a reader never sees half a file."""
        if not self._file:
            return
        part = Path(f"{self._file}.part")
        try:
            part.write_text(_text(self.plain()), encoding="utf-8")
            os.replace(part, self._file)
        except OSError as error:
            raise CliError(
                f"cannot write {self._file}: {error.strerror}; name another file with --json"
            ) from None
        self._saved = time.monotonic()

    def plain(self) -> dict[str, Any]:
        device = msgspec.to_builtins(self._found.device)
        device["features"] = sorted(device["features"])
        rows = [row.plain() for row in self._rows.values()]
        return {
            **self._head,
            "schema": SCHEMA,
            "device": device,
            "devices": len(self._found.devices),
            "complete": self._complete,
            "seconds": round(time.monotonic() - self._begun, 1),
            "passed": sum(row["passed"] for row in rows),
            "failed": sum(row["failed"] for row in rows),
            "skipped": sum(row["skipped"] for row in rows),
            "implementations": rows,
            "results": self._results,
        }

    def show(self, console: Console) -> None:
        """The table; the file is written a last time."""
        self._complete = len(self._results) == self._expected
        self.save()
        console.print(self._table())
        for why, names in self._reasons().items():
            console.print(Text(f"{', '.join(names)}: {why}", style="dim"), soft_wrap=True)
        rows = self._rows.values()
        for row in rows:
            if row.failure:
                text = f"failed: {row.op} {row.implementation}: {row.failure}"
                console.print(Text(text, style="red"), soft_wrap=True)
        passed, skipped = sum(r.passed for r in rows), sum(r.skipped for r in rows)
        seconds = time.monotonic() - self._begun
        console.print(
            f"{passed} cases passed, {self.failed} failed, {skipped} tests skipped in {seconds:.0f} s",
            style="red" if self.failed else "green",
            highlight=False,
        )
        if self._file:
            console.print(f"report: {self._file}", highlight=False, soft_wrap=True)

    def _reasons(self) -> dict[str, list[str]]:
        """Reasons of verdicts, and why nothing at all was tested -> the rows that have them."""
        found: dict[str, list[str]] = {}
        for row in self._rows.values():
            why = "; ".join(row.reasons)
            if not why and not row.passed and not row.failed:
                why = next(iter(row.why_skipped), "")
            if why:
                found.setdefault(why, []).append(f"{row.op} {row.implementation}".strip())
        return found

    def _table(self) -> Table:
        """A line for each implementation; reasons and failures are told below it, whole."""
        caption = "error: the largest, as a multiple of what the contract tolerates"
        table = Table(
            caption=caption, box=box.SIMPLE_HEAD, padding=0
        )  # narrow: it has to fit 80 columns
        for name in ("op", "implementation", "verdict"):
            table.add_column(name, no_wrap=True)
        for name in ("passed", "failed", "skipped", "error"):
            table.add_column(name, justify="right", no_wrap=True)
        last = ""
        for row in self._rows.values():
            if row.op != last:
                table.add_section()
            table.add_row(
                row.op if row.op != last else "",
                row.implementation,
                Text(row.verdict, style=STYLE.get(row.verdict, "")),
                str(row.passed),
                Text(str(row.failed), style="bold red" if row.failed else ""),
                str(row.skipped),
                "" if row.excess < 0 else f"{row.excess:.2g}",
            )
            last = row.op
        return table

    def _verdict(self, op: str, name: str) -> tuple[str, tuple[str, ...]]:
        """The best verdict over all queries, with its reasons: what selection says now, without a self-test."""
        if op not in CONTRACTS and not (op == COLLECTIVES and name):
            return "", ()
        return best_verdict(self._found, op, name)


def best_verdict(found: ResolvedPlatform, op: str, name: str) -> tuple[str, tuple[str, ...]]:
    """("yes" | "unverified" | "no", reasons) of an implementation for the query it serves best."""
    registry, order = found.registry(), ("yes", "unverified", "no")
    best: tuple[str, tuple[str, ...]] = ("no", ())
    asked = [GroupQuery(max(2, len(found.devices)))] if op == COLLECTIVES else queries(op)
    for query in asked:
        try:
            candidates = select(op, query, found.device, registry).candidates
        except SelectionError as error:
            candidates = error.candidates
        row = next(row for row in candidates if row.name == name)
        if not best[1] or order.index(row.status) < order.index(best[0]):
            best = row.status, row.reasons
        if row.status == "yes":
            break
    return best


def _text(report: dict[str, Any]) -> str:
    """JSON with a line for each result: they are many."""
    rows = ",\n  ".join(json.dumps(row) for row in report["results"])
    rest = {name: value for name, value in report.items() if name != "results"}
    head = json.dumps(rest, indent=1).removesuffix("\n}")
    return f'{head},\n "results": [\n  {rows}\n ]\n}}\n'


def number(excess: float) -> float | str | None:
    """For JSON, which has no infinity: three digits; None = not measured."""
    if excess < 0:
        return None
    return float(f"{excess:.3g}") if math.isfinite(excess) else "inf"


def _plain(test: Test, result: Result) -> dict[str, Any]:
    def case(row: Case) -> dict[str, Any]:
        short: dict[str, Any] = {"case": row.name, "error_over_tolerance": number(row.excess)}
        return short | ({"failure": row.text} if row.text else {})

    return {
        "op": test.area,
        "implementation": test.implementation,
        "test": test.text,
        "status": result.status,
        "text": result.text,
        "seconds": result.seconds,
        "cases": [case(row) for row in result.cases],
    }


def _versions(found: ResolvedPlatform) -> Mapping[str, str]:
    """The device's own and those of every distribution that an implementation asks for."""
    asked = {need.distribution for row in _rows(found) for need in row.requires}
    here = {name: version for name in sorted(asked) if (version := installed_version(name))}
    plugin = metadata.entry_points(group="headrace.platforms")
    owners = {
        entry.dist.name: entry.dist.version
        for entry in plugin
        if entry.name == found.platform.name and entry.dist is not None
    }
    return {**dict(found.device.versions), **here, **owners}


def _rows(found: ResolvedPlatform) -> Iterable[Implementation]:
    return found.platform.implementations()
