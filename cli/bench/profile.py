"""Where a step's time goes: the server's /debug/step as tables, against what memory and arithmetic allow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from headrace.cli.bench import trace
from headrace.engine.config.sizes import format_bytes

# The host's parts of a step, in the order in which they come; what is waited for is not the host's work.
HOST = ("inputs", "launch", "sampling", "other", "results")
MOST_KERNELS = 3  # of an op, in the table
NAME = 60  # characters of a kernel's name there


def grouped(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Equal ops together, the costliest first; then what no op accounts for.

    share: of the whole step. limit_s: the time that the bytes, or the operations, must take; None where neither is
    known. of_limit passes 1 where a cache holds the bytes. kernels: (name, seconds), the costliest first.
    """
    kernels = trace.read(step["trace"]) if step["trace"] else trace.Kernels()
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for number, (op, detail, nbytes, operations, seconds) in enumerate(step["ops"]):
        own: Mapping[str, float] = kernels.ops.get(number, {})
        row = groups.setdefault((op, detail), _row(op, detail))
        row["count"] += 1
        row["seconds"] += sum(own.values()) if step["trace"] else seconds
        row["bytes"] += nbytes
        row["operations"] += operations
        for name, took in own.items():
            row["kernels"][name] = row["kernels"].get(name, 0.0) + took
    rows = sorted(groups.values(), key=lambda row: -row["seconds"])
    for part, names in kernels.parts.items():
        rows.append({**_row(part, "no op"), "count": 1, "kernels": dict(names)})
        rows[-1]["seconds"] = sum(names.values())
    busy = kernels.busy if step["trace"] else sum(row["seconds"] for row in rows)
    rest = "the device waits" if step["trace"] else "the rest"
    detail = "between kernels" if step["trace"] else "sampling, host"
    rows.append({**_row(rest, detail), "count": 1, "seconds": max(0.0, step["step_s"] - busy)})
    for row in rows:
        row["share"] = row["seconds"] / step["step_s"]
        row["limit_s"] = _limit(row, step)
        limited = row["limit_s"] and row["seconds"]
        row["of_limit"] = row["limit_s"] / row["seconds"] if limited else None
        row["kernels"] = sorted(row["kernels"].items(), key=lambda item: -item[1])
    return rows


def _row(op: str, detail: str) -> dict[str, Any]:
    zero = {"count": 0, "seconds": 0.0, "bytes": 0, "operations": 0}
    return {"op": op, "detail": detail, **zero, "kernels": {}}


def _limit(row: Mapping[str, Any], step: Mapping[str, Any]) -> float | None:
    reading = row["bytes"] / step["bandwidth"] if step["bandwidth"] else 0.0
    computing = row["operations"] / step["multiply"] if step["multiply"] else 0.0
    return max(reading, computing) or None


def summary(step: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A whole step: the time that its ops must take (limit_s), how near it comes, and the host's part."""
    limit = sum(row["limit_s"] or 0.0 for row in rows) or None
    host = sum(step["host"][name] for name in HOST)
    kernels = trace.read(step["trace"]) if step["trace"] else None
    return {
        "requests": step["requests"],
        "context": step["context"],
        "prompt": step["prompt"],
        "decodes": step["decodes"],
        "filled": step["filled"],
        "steps": step["steps"],
        "step_s": step["step_s"],
        "bytes": sum(row["bytes"] for row in rows),
        "operations": sum(row["operations"] for row in rows),
        "bandwidth": step["bandwidth"],
        "multiply": step["multiply"],
        "limit_s": limit,
        "of_limit": limit / step["step_s"] if limit else None,
        "tokens_per_s": (step["requests"] * (step["prompt"] or 1) + step["decodes"])
        / step["step_s"],
        "host": dict(step["host"]),
        "host_s": host,
        "device_busy_s": kernels.busy if kernels else None,
        "hidden": None if step["on_host"] else step["host"]["wait"] > 0.05 * step["step_s"],
    }


def table(whole: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> Table:
    what = f"that read {whole['prompt']} more" if whole["prompt"] else "that decode"
    if whole["decodes"]:
        what += f", and {whole['decodes']} that decode"
    title = (
        f"{whole['requests']} requests of {whole['context']} tokens {what}: "
        f"{whole['step_s'] * 1e3:.2f} ms a step, {whole['tokens_per_s']:.0f} tokens/s"
    )
    if whole["limit_s"]:
        title += (
            f"; {format_bytes(whole['bytes'])} at {whole['bandwidth'] / 1e9:.1f} GB/s and "
            f"{whole['operations'] / 1e9:.3g} billion operations at {whole['multiply'] / 1e12:.2f} T/s would take "
            f"{whole['limit_s'] * 1e3:.2f} ms ({whole['of_limit']:.0%} of the limit)"
        )
    made = Table("op", "sizes, kernels", title=title, title_justify="left")
    for name in ("calls", "ms", "share", "bytes", "limit ms", "of limit"):
        made.add_column(name, justify="right")
    for row in rows:
        made.add_row(
            row["op"],
            Text(row["detail"]),
            str(row["count"]),
            f"{row['seconds'] * 1e3:.3f}",
            f"{row['share']:.1%}",
            format_bytes(row["bytes"]) if row["bytes"] else "",
            "" if row["limit_s"] is None else f"{row['limit_s'] * 1e3:.3f}",
            "" if row["of_limit"] is None else f"{row['of_limit']:.0%}",
        )
        for name, seconds in row["kernels"][:MOST_KERNELS]:
            cells = (Text(name[:NAME], style="dim"), "", Text(f"{seconds * 1e3:.3f}", style="dim"))
            made.add_row("", *cells)
    return made


def host_line(whole: Mapping[str, Any]) -> str:
    """What the worker's thread does for a step, and whether the device waits for it."""
    parts = ", ".join(f"{name} {1e3 * whole['host'][name]:.3f}" for name in HOST)
    if whole["hidden"] is None:
        return f"the host is the device; its thread's processor time, ms a step by part: {parts}"
    state = "hidden behind the device" if whole["hidden"] else "NOT hidden: the device waits for it"
    waits = f"waits {1e3 * whole['host']['wait']:.3f} ms for the device"
    return f"worker's thread, processor time, ms a step: {1e3 * whole['host_s']:.3f} ({parts}); {waits}: {state}"
