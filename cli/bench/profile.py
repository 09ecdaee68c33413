"""Where a decode step's time goes: the server's /debug/step as tables, against what the memory can deliver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from headrace.engine.config.sizes import format_bytes


def grouped(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Equal ops together, the costliest first; then what no op accounts for: sampling, the host's part, waiting.

    share: of the whole step. of_limit: bytes of weights a second over the memory's read bandwidth; None where an op
    reads none. It passes 1 where a cache holds the weights.
    """
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for op, detail, weight_bytes, seconds in step["ops"]:
        row = groups.setdefault(
            (op, detail), {"op": op, "detail": detail, "count": 0, "seconds": 0.0, "bytes": 0}
        )
        row["count"] += 1
        row["seconds"] += seconds
        row["bytes"] += weight_bytes
    rows = sorted(groups.values(), key=lambda row: -row["seconds"])
    rest = max(0.0, step["step_s"] - sum(row["seconds"] for row in rows))
    rows.append(
        {"op": "the rest", "detail": "sampling, host", "count": 1, "seconds": rest, "bytes": 0}
    )
    for row in rows:
        row["share"] = row["seconds"] / step["step_s"]
        row["of_limit"] = _of_limit(row["bytes"], row["seconds"], step["bandwidth"])
    return rows


def summary(step: Mapping[str, Any]) -> dict[str, Any]:
    """A whole step: the time that reading its weights once must take (limit_s), and how near it comes."""
    total = sum(weight_bytes for _, _, weight_bytes, _ in step["ops"])
    return {
        "requests": step["requests"],
        "context": step["context"],
        "step_s": step["step_s"],
        "weight_bytes": total,
        "bandwidth": step["bandwidth"],
        "limit_s": total / step["bandwidth"] if step["bandwidth"] else None,
        "of_limit": _of_limit(total, step["step_s"], step["bandwidth"]),
        "tokens_per_s": step["requests"] / step["step_s"],
    }


def _of_limit(nbytes: int, seconds: float, bandwidth: float) -> float | None:
    return nbytes / seconds / bandwidth if nbytes and seconds and bandwidth else None


def table(step: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> Table:
    whole = summary(step)
    title = (
        f"{whole['requests']} requests of {whole['context']} tokens: {whole['step_s'] * 1e3:.2f} ms a step, "
        f"{whole['tokens_per_s']:.0f} tokens/s"
    )
    if whole["limit_s"]:
        title += (
            f"; {format_bytes(whole['weight_bytes'])} of weights at {whole['bandwidth'] / 1e9:.1f} GB/s "
            f"would take {whole['limit_s'] * 1e3:.2f} ms ({whole['of_limit']:.0%} of the limit)"
        )
    made = Table("op", "sizes", title=title, title_justify="left")
    for name in ("calls", "ms", "share", "weights", "GB/s", "of limit"):
        made.add_column(name, justify="right")
    for row in rows:
        rate = row["bytes"] / row["seconds"] / 1e9 if row["bytes"] and row["seconds"] else 0.0
        made.add_row(
            row["op"],
            Text(row["detail"]),
            str(row["count"]),
            f"{row['seconds'] * 1e3:.3f}",
            f"{row['share']:.1%}",
            format_bytes(row["bytes"]) if row["bytes"] else "",
            f"{rate:.1f}" if rate else "",
            "" if row["of_limit"] is None else f"{row['of_limit']:.0%}",
        )
    return made
