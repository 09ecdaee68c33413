"""Tables and plots of a benchmark's results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.cli.bench.load import PERCENTILES
from headrace.cli.errors import RUNTIME, CliError

SERIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "inter-token latency",
    "e2e_ms": "end to end",
}


def show(results: Sequence[dict[str, Any]]) -> None:
    console = Console()
    console.print(_rates(results))
    for result in results:
        if result["failed"]:
            console.print(
                f"{result['level']}: {result['failed']} of {result['requests']} failed: "
                f"{'; '.join(result['errors'])}",
                style="red",
                markup=False,
            )
    for result in results:
        if "wall_s" in result:
            console.print(_percentiles(result))


def _rates(results: Sequence[dict[str, Any]]) -> Table:
    table = Table("load", title="Throughput", title_justify="left")
    for name in ("requests", "wall s", "req/s", "output tok/s", "total tok/s"):
        table.add_column(name, justify="right")
    for result in results:
        if "wall_s" in result:
            table.add_row(
                result["level"],
                str(result["requests"] - result["failed"]),
                f"{result['wall_s']:.2f}",
                f"{result['requests_per_s']:.2f}",
                f"{result['output_tokens_per_s']:.1f}",
                f"{result['total_tokens_per_s']:.1f}",
            )
    return table


def _percentiles(result: dict[str, Any]) -> Table:
    columns = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    table = Table("ms", title=result["level"], title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    for key, title in SERIES.items():
        if key in result:
            table.add_row(title, *(f"{result[key][name]:.1f}" for name in columns))
    return table


def plot(path: str, results: Sequence[dict[str, Any]]) -> None:
    """Throughput and latency over the levels, as an image."""
    try:
        import matplotlib
    except ImportError:
        raise CliError("--plot needs matplotlib: pip install 'headrace[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [result for result in results if "wall_s" in result]
    if not rows:
        raise CliError("nothing to plot: every request failed", RUNTIME)
    names = [row["level"] for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    left.bar(names, [row["output_tokens_per_s"] for row in rows])
    left.set_ylabel("output tokens/s")
    for key in ("ttft_ms", "tpot_ms"):
        kept = [row for row in rows if key in row]
        for percent in (50, 99):
            values = [row[key][f"p{percent}"] for row in kept]
            right.plot(
                [row["level"] for row in kept],
                values,
                marker="o",
                label=f"{SERIES[key]} p{percent}",
            )
    right.set_ylabel("ms")
    right.set_yscale("log")
    right.legend()
    for axis in (left, right):
        axis.tick_params(axis="x", rotation=20)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise CliError(f"cannot write {path}: {error}") from None
