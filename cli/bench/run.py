"""Runs the bench commands: connects, shows progress, prints tables, writes files."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from headrace.cli.api import Address
from headrace.cli.bench.load import Load
from headrace.cli.bench.load import run as run_load
from headrace.cli.bench.record import record, write_json
from headrace.cli.bench.report import plot, show
from headrace.cli.bench.startup import measure
from headrace.cli.errors import RUNTIME, CliError
from headrace.cli.session import connect
from headrace.engine.config.flag import Given
from headrace.engine.config.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class Target:
    model: str
    url: str
    key: str
    given: Sequence[Given]


@dataclass(frozen=True, slots=True)
class TraceOutput:
    json_file: str = ""
    chrome_trace: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    json_file: str = ""
    plot_file: str = ""


def load(prompt: int, output: int, requests: int, warmup: int, shared: int, seed: str) -> Load:
    """A level of one request at a time. Without a seed every run has new prompts, so that no cache can help."""
    return Load(
        prompt_tokens=prompt,
        output_tokens=output,
        requests=requests,
        warmup=warmup,
        shared_prefix=shared,
        seed=seed or str(time.time_ns()),
    )


def numbers(option: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise CliError(f"{option}: expected numbers such as 1,4,16, got {text!r}")
    return list(dict.fromkeys(values))


def levels(base: Load, concurrency: str, rate: float) -> dict[str, Load]:
    """Levels by name. Each has prompts of its own, so that one level never warms the next one's cache."""
    if rate > 0:
        return {f"{rate:g} requests/s": replace(base, concurrency=0, rate=rate)}
    return {
        f"concurrency {count}": replace(
            base,
            concurrency=count,
            requests=max(base.requests, count),
            seed=f"{base.seed} {count}",
        )
        for count in numbers("--concurrency", concurrency)
    }


def bench(command: str, target: Target, loads: Mapping[str, Load], output: Output) -> None:
    """Run every level against the target, print the tables, write what was asked for."""
    if output.plot_file:
        _require_matplotlib()
    with connect(target.model, target.url, target.key, target.given) as (api, name):
        results = asyncio.run(_levels(api.where, name, loads))
    show(results)
    arguments = {
        "target": target.model or target.url or "the local server",
        "settings": [f"{row.flag.name}={row.value}" for row in target.given],
        "levels": {level: asdict(value) for level, value in loads.items()},
    }
    _write(f"bench {command}", arguments, results, output)
    if all(result["failed"] for result in results):
        raise CliError("requests failed at every level", RUNTIME)


async def _levels(where: Address, model: str, loads: Mapping[str, Load]) -> list[dict[str, Any]]:
    results = []
    with _progress() as progress:
        for level, value in loads.items():
            task = progress.add_task(level, total=value.requests)

            def update(done: int, task: Any = task) -> None:
                progress.update(task, completed=done)

            results.append({"level": level, **await run_load(where, model, value, update)})
    return results


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal; nothing where the output is a file."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as progress:
        yield progress


def startup(
    model: str, given: Sequence[Given], config: str, plan: tuple[int, float], json_file: str
) -> None:
    """`plan`: (starts, seconds to watch the idle server)."""
    repeats, idle_seconds = plan
    results = []
    with _progress() as progress:
        task = progress.add_task(f"starting {model}", total=repeats)
        for _ in range(repeats):
            results.append(measure(model, given, config, idle_seconds))
            progress.advance(task)
    table = Table("start", "ready s", "first token s", "memory", "processes", "idle % of a core")
    for number, row in enumerate(results, 1):
        table.add_row(str(number), *_startup_cells(row))
    if repeats > 1:
        keys = ("ready_s", "first_token_s", "resident_bytes", "processes", "idle_cpu_percent")
        table.add_row(
            "median", *_startup_cells({key: median(r[key] for r in results) for key in keys})
        )
    Console().print(table)
    arguments = {
        "model": model,
        "settings": [f"{row.flag.name}={row.value}" for row in given],
        "repeats": repeats,
        "idle_seconds": idle_seconds,
    }
    _write("bench startup", arguments, results, Output(json_file))


def _startup_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['ready_s']:.2f}",
        f"{row['first_token_s']:.2f}",
        format_bytes(row["resident_bytes"]),
        f"{row['processes']:g}",
        f"{row['idle_cpu_percent']:.1f}",
    )


def _write(
    command: str, arguments: dict[str, Any], results: list[dict[str, Any]], output: Output
) -> None:
    if output.json_file:
        write_json(output.json_file, record(command, arguments, results))
    if output.plot_file:
        plot(output.plot_file, results)


def _require_matplotlib() -> None:
    """Before anything is measured."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise CliError("--plot needs matplotlib: pip install 'headrace[plot]'")


def perplexity(target: Target, file: str, sizes: tuple[int, int], json_file: str) -> None:
    """`sizes`: (context, stride) in tokens; 0 leaves one open."""
    from headrace.cli.bench.perplexity import measure as score
    from headrace.cli.bench.perplexity import read_text

    text = read_text(file)
    with (
        connect(target.model, target.url, target.key, target.given) as (api, name),
        _progress() as progress,
    ):
        task = progress.add_task("windows", total=None)

        def update(done: int, every: int) -> None:
            progress.update(task, completed=done, total=every)

        found = asyncio.run(score(api.where, name, text, sizes, update))
    Console().print(
        f"perplexity {found['perplexity']:.4f} ± {found['error']:.4f}: {found['scored_tokens']} of "
        f"{found['text_tokens']} tokens, {found['windows']} windows of {found['context']} every "
        f"{found['stride']}, {found['seconds']:.1f} s ({found['tokens_per_s']:.0f} tokens/s)",
        highlight=False,
    )
    arguments = {
        "target": target.model or target.url or "the local server",
        "settings": [f"{row.flag.name}={row.value}" for row in target.given],
        "file": file,
        "characters": len(text),
    }
    _write("bench perplexity", arguments, [found], Output(json_file))


def profile(target: Target, loads: Sequence[Mapping[str, int]], output: TraceOutput) -> None:
    """A table for each load: requests, context, prompt, decodes."""
    from headrace.cli.bench import hosts
    from headrace.cli.bench.profile import grouped, host_line, summary, table
    from headrace.cli.bench.trace import chrome

    results: list[dict[str, Any]] = []
    console = Console()
    with connect(target.model, target.url, target.key, target.given) as (api, name):
        for load in loads:
            step = api.get("/debug/step?" + "&".join(f"{name}={n}" for name, n in load.items()))
            if output.chrome_trace:
                write_json(with_number(output.chrome_trace, len(results), len(loads)), chrome(step))
            try:
                rows = grouped(step)
            except ValueError as error:
                raise CliError(f"{error}; --chrome-trace keeps what there is", RUNTIME) from None
            whole = summary(step, rows)
            console.print(table(whole, rows))
            console.print(host_line(whole), highlight=False)
            shares = None
            if target.model and not load["prompt"] and hosts.can_be_seen():
                shares = hosts.measure(api.where, name, step)
                console.print(hosts.line(shares), highlight=False)
            results.append({**whole, "processes": shares, "ops": rows})
    arguments = {
        "target": target.model or target.url or "the local server",
        "settings": [f"{row.flag.name}={row.value}" for row in target.given],
    }
    _write("bench profile", arguments, results, Output(output.json_file))


def with_number(path: str, index: int, count: int) -> str:
    """ "trace.json" -> "trace-2.json" for the second of several."""
    file = Path(path)
    return path if count == 1 else str(file.with_name(f"{file.stem}-{index + 1}{file.suffix}"))


def tune(model: str, given: Sequence[Given], plan: tuple[float, str], json_file: str) -> None:
    """`plan`: (seconds, file of the options, "" = the device's own in the cache folder)."""
    from headrace.cli.bench.tune import run as run_tune

    seconds, output = plan
    results = run_tune(model, given, seconds, output)
    arguments = {
        "model": model,
        "settings": [f"{row.flag.name}={row.value}" for row in given],
        "seconds": seconds,
    }
    _write("bench tune", arguments, results, Output(json_file))
