"""`headrace bench tune`: the fastest launch options for a model's shapes on this device, kept for the next start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from headrace.cli.configure import configure, find_device
from headrace.cli.errors import RUNTIME, CliError
from headrace.cli.prepare import Plan, decide, prepare
from headrace.engine.config import env
from headrace.engine.config.flag import Given
from headrace.platforms import tuned
from headrace.platforms.registry import Decision

if TYPE_CHECKING:
    from headrace.platforms.triton.tuning import Outcome, Subject

TRITON = "triton"  # implementations of this name take their launch options from what is tuned


def run(model: str, given: Sequence[Given], seconds: float, output: str) -> list[dict[str, Any]]:
    """Tunes, shows, writes. Returns the table's rows."""
    settings = configure(model, given, "")
    plan = prepare(settings, find_device(settings))
    queries = tunable(plan, decide(plan))
    path = Path(output) if output else env.tuned_file(plan.device.name)
    console = Console()
    found = measure(plan, queries, seconds)
    console.print(table(found))
    better = {one.subject.key: dict(one.options) for one in found if one.options}
    if better:
        try:
            tuned.write(path, plan.device.name, better)
        except OSError as error:
            raise CliError(
                f"cannot write {path}: {error.strerror}; name a file with --output"
            ) from None
    console.print(Text(ending(found, better, path, output)), soft_wrap=True)
    return [plain(one) for one in found]


def tunable(plan: Plan, decisions: Sequence[Decision]) -> list[tuple[str, Any]]:
    """What the model's choice leaves to Triton's kernels. CliError where that is nothing."""
    queries = [(one.op, one.query) for one in decisions if one.chosen == TRITON]
    if not queries:
        raise CliError(
            f"nothing to tune: no op of {plan.files.name} runs on Triton's kernels on {plan.device.spec} "
            f"({plan.device.name}); see headrace explain {plan.config.model.model}"
        )
    return queries


def measure(plan: Plan, queries: Sequence[tuple[str, Any]], seconds: float) -> list[Outcome]:
    """On the device, with a bar for the time that is given."""
    from headrace.platforms.triton import tuning

    runtime = plan.found.platform.open(plan.device)
    try:
        measured = tuned.read(env.tuned_file(plan.device.name), plan.device.name)
        runtime.tuned = measured.options
        asked, began = tuning.subjects(queries, runtime), time.monotonic()
        with _bar(seconds) as bar:
            task = bar.add_task("", total=seconds)

            def show(subject: Subject, tried: int) -> None:
                text = f"{subject.kernel} {subject.shape}, {subject.load}: {tried} of {len(subject.candidates)}"
                bar.update(task, completed=time.monotonic() - began, description=text)

            timer = tuning.GraphTimer(runtime)
            return list(tuning.tune(asked, runtime, timer, seconds, show))
    finally:
        runtime.close()


def _bar(seconds: float) -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def table(found: Sequence[Outcome]) -> Table:
    made = Table("kernel", "shape", "load")
    for name in ("now us", "best us", "gain", "tried"):
        made.add_column(name, justify="right")
    made.add_column("options")
    for one in found:
        subject = one.subject
        tried = f"{one.tried} of {len(subject.candidates)}"
        cells: list[str | Text] = ["", "", "", tried, Text(one.note, style="yellow")]
        if one.now:
            options = ", ".join(f"{name} {value}" for name, value in (one.options or {}).items())
            gain = f"{1 - one.best / one.now:.0%}" if one.options else ""
            cells = [f"{1e6 * one.now:.2f}", f"{1e6 * one.best:.2f}", gain, tried]
            cells.append(Text(options or "those in use"))
        made.add_row(subject.kernel, subject.shape, subject.load, *cells)
    return made


def ending(found: Sequence[Outcome], better: dict[str, Any], path: Path, output: str) -> str:
    if found and not any(one.now for one in found):
        raise CliError(
            f"nothing was measured: {found[0].note}; give it longer with --seconds", RUNTIME
        )
    if not better:
        return "the options in use are the fastest that were tried; nothing was written"
    text = f"{len(better)} written to {path}; "
    if output:
        return (
            text
            + "a start takes the file of its device's name in the cache folder: see headrace doctor"
        )
    return text + "the next start on this device takes them"


def plain(one: Outcome) -> dict[str, Any]:
    subject = one.subject
    return {
        "kernel": subject.kernel,
        "shape": subject.shape,
        "load": subject.load,
        "key": subject.key,
        "now_us": round(1e6 * one.now, 3),
        "best_us": round(1e6 * one.best, 3),
        "current": dict(subject.current),
        "options": dict(one.options or {}),
        "tried": one.tried,
        "candidates": len(subject.candidates),
        "note": one.note,
    }
