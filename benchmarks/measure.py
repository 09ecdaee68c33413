"""Runs the benchmarks of README.md one after the other, writes results/NAME.json and compares with the goals."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.cli.bench.record import record, write_json

HERE = Path(__file__).parent
RESULTS = HERE / "results"
HEADRACE = (sys.executable, "-m", "headrace.cli.main")
REPEATS = 10

# (name of the figure, its value from the results, goal, "max" or "min")
Goal = tuple[str, Callable[[list[dict[str, Any]]], float], float, str]


def _median(key: str) -> Callable[[list[dict[str, Any]]], float]:
    return lambda rows: statistics.median(row[key] for row in rows)


GOALS: dict[str, list[Goal]] = {
    "help": [("slowest help, s", lambda rows: max(row["median_s"] for row in rows), 0.3, "max")],
    "startup": [
        ("ready, s", _median("ready_s"), 4.0, "max"),
        ("first token after that, s", _median("first_token_s"), 0.5, "max"),
        ("memory of all processes, GB", lambda r: _median("resident_bytes")(r) / 1e9, 1.2, "max"),
        ("idle share of a core, %", _median("idle_cpu_percent"), 2.0, "max"),
    ],
    "scheduler": [
        (
            "slowest case, sequences/s",
            lambda rows: min(row["sequences_per_second"] for row in rows),
            20_000,
            "min",
        )
    ],
}


def measure_help(file: Path, _model: str) -> None:
    rows = []
    for arguments in (("--help",), ("serve", "--help")):
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            subprocess.run([*HEADRACE, *arguments], stdout=subprocess.DEVNULL, check=True)
            times.append(time.perf_counter() - began)
        rows.append(
            {
                "command": " ".join(("headrace", *arguments)),
                "median_s": round(statistics.median(times), 4),
                "max_s": round(max(times), 4),
            }
        )
    write_json(str(file), record("help", {"repeats": REPEATS}, rows))


def _bench(*arguments: str) -> Callable[[Path, str], None]:
    def run(file: Path, model: str) -> None:
        name, *options = arguments
        command = [*HEADRACE, "bench", name, model, *options, "--json", str(file)]
        subprocess.run(command, check=True)

    return run


def measure_scheduler(file: Path, _model: str) -> None:
    subprocess.run([sys.executable, str(HERE / "scheduler.py"), "--json", str(file)], check=True)


MEASURES: dict[str, Callable[[Path, str], None]] = {
    "help": measure_help,
    "startup": _bench("startup", "--repeats", "5"),
    "latency": _bench("latency"),
    "serve": _bench("serve", "--num-requests", "32"),
    "throughput": _bench("throughput"),
    "scheduler": measure_scheduler,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*MEASURES, []], help="default: all")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    arguments = parser.parse_args()
    os.chdir(
        tempfile.gettempdir()
    )  # away from the checkout: the installed package is what is measured
    out = arguments.out if arguments.out.is_absolute() else HERE.parent / arguments.out
    out.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or MEASURES:
        print(f"\n== {name}", flush=True)
        MEASURES[name](out / f"{name}.json", arguments.model)
    print("\n== goals")
    for name in arguments.names or MEASURES:
        _compare(name, json.loads((out / f"{name}.json").read_text()))


def _compare(name: str, data: dict[str, Any]) -> None:
    for text, value_of, goal, kind in GOALS.get(name, ()):
        value = value_of(data["results"])
        met = value <= goal if kind == "max" else value >= goal
        print(f"{'met   ' if met else 'MISSED'} {name}: {text} {value:.3f} (at {kind} {goal:g})")


if __name__ == "__main__":
    main()
