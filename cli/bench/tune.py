"""`headrace bench tune`: the fastest launch options for a model's shapes on this device, and the implementations that
are faster than those in use, kept for the next start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from headrace.cli.configure import configure, find_device
from headrace.cli.errors import RUNTIME, CliError
from headrace.cli.prepare import Plan, decide, policy_of, prepare
from headrace.engine.config import env
from headrace.engine.config.flag import Given
from headrace.platforms import tuned
from headrace.platforms.registry import Decision

if TYPE_CHECKING:
    from headrace.platforms.triton.rivals import Contest
    from headrace.platforms.triton.tuning import Outcome, Subject

TRITON = "triton"  # implementations of this name take their launch options from what is tuned


def run(model: str, given: Sequence[Given], seconds: float, output: str) -> list[dict[str, Any]]:
    """Tunes, shows, writes. Returns the table's rows."""
    settings = configure(model, given, "")
    plan = prepare(settings, find_device(settings))
    decisions = decide(plan)
    queries = tunable(plan, decisions)
    path = Path(output) if output else env.tuned_file(plan.device.name)
    console = Console()
    found, contests = measure(plan, queries, [(one.op, one.query) for one in decisions], seconds)
    console.print(table(found))
    if contests:
        console.print(rivals_table(contests))
    better = options_of(found) | choices_of(contests)
    if better:
        try:
            tuned.write(path, plan.device.name, better)
        except OSError as error:
            raise CliError(
                f"cannot write {path}: {error.strerror}; name a file with --output"
            ) from None
    console.print(Text(ending(found, better, path, output)), soft_wrap=True)
    return [*(plain(one) for one in found), *(plain_contest(one) for one in contests)]


def options_of(found: Sequence[Outcome]) -> dict[str, Any]:
    return {one.subject.key: dict(one.options) for one in found if one.options}


def choices_of(contests: Sequence[Contest]) -> dict[str, Any]:
    """Of several that are faster than the one in use, the fastest."""
    best: dict[str, Contest] = {}
    for one in sorted((one for one in contests if one.won), key=_gain):
        best[tuned.key("paged_attention", one.query, {})] = one
    return {name: tuned.choice(one.rival, one.requires) for name, one in best.items()}


def _gain(one: Contest) -> float:
    """Of all loads together."""
    return prod(old / new for old, new in zip(one.now, one.took, strict=True))


def tunable(plan: Plan, decisions: Sequence[Decision]) -> list[tuple[str, Any]]:
    """What the model's choice leaves to Triton's kernels. CliError where that is nothing."""
    queries = [(one.op, one.query) for one in decisions if one.chosen == TRITON]
    if not queries:
        raise CliError(
            f"nothing to tune: no op of {plan.files.name} runs on Triton's kernels on {plan.device.spec} "
            f"({plan.device.name}); see headrace explain {plan.config.model.model}"
        )
    return queries


def measure(
    plan: Plan,
    queries: Sequence[tuple[str, Any]],
    asked_of_all: Sequence[tuple[str, Any]],
    seconds: float,
) -> tuple[list[Outcome], list[Contest]]:
    """On the device, with a bar for the time that is given to launch options; implementations are compared behind it.
    `queries` are Triton's, `asked_of_all` those of the whole model."""
    from headrace.platforms.triton import rivals, tuning

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
            found = list(tuning.tune(asked, runtime, timer, seconds, show))
            runtime.tuned = {**measured.options, **options_of(found)}
            place = plan.found.registry(), policy_of(plan), runtime, timer
            held = rivals.contests(
                asked_of_all, *place, lambda text: bar.update(task, description=text)
            )
            return found, list(held)
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


def rivals_table(contests: Sequence[Contest]) -> Table:
    """A layer's microseconds, the loads side by side."""
    made = Table("attention", "in use", "us", "compared with", "us", "")
    for one in contests:
        times = [" / ".join(f"{1e6 * t:.1f}" for t in row) for row in (one.now, one.took)]
        verdict = Text(one.note, style="yellow") if one.note else Text("faster" if one.won else "")
        made.add_row(_shape(one), one.used, times[0], one.rival, times[1], verdict)
    return made


def _shape(one: Contest) -> str:
    query = one.query
    window = f", window {query.window}" if query.window else ""
    return f"{query.q_heads}/{query.kv_heads} x {query.head_dim}{window}"


def plain_contest(one: Contest) -> dict[str, Any]:
    return {
        "op": "paged_attention",
        "shape": _shape(one),
        "used": one.used,
        "rival": one.rival,
        "used_us": [round(1e6 * t, 3) for t in one.now],
        "rival_us": [round(1e6 * t, 3) for t in one.took],
        "won": one.won,
        "note": one.note,
    }


def ending(found: Sequence[Outcome], better: dict[str, Any], path: Path, output: str) -> str:
    if found and not any(one.now for one in found):
        raise CliError(
            f"nothing was measured: {found[0].note}; give it longer with --seconds", RUNTIME
        )
    if not better:
        return "what is in use is the fastest that was tried; nothing was written"
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
