"""The tables and the picture of the loads on one NVIDIA H200, beside vLLM's figures and the goals.

    python -m benchmarks.cuda.plot       # writes docs/benchmarks/cuda-h200.md and .svg, and both READMEs

Takes benchmarks/results/cuda-h200*.json, or the files of --json; of results of one model and load the newest counts. In
the READMEs it writes what stands between the lines that name it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.cpu.plot import BAR, GAP, HEAD, STYLE, WIDTH, number

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PEER = RESULTS / "cuda-h200-vllm.json"
DOCS = ROOT / "docs/benchmarks"
READMES = (ROOT / "README.md", ROOT / "benchmarks/cuda/README.md")
BEGIN, END = "<!-- made by python -m benchmarks.cuda.plot -->", "<!-- end -->"
COLORS = {"headrace": "#d9480f", "vLLM 0.24.0": "#37b24d"}
LABEL = 90
READ = 4.38e12  # bytes a second that an H200 was seen to read

TITLES = {
    "llama-3.1-8b": "Llama 3.1 8B",
    "qwen3-30b-a3b": "Qwen3 30B-A3B",
    "llama-3.2-1b": "Llama 3.2 1B",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one model: where it stands in a result, what it is to reach, and what the device allows."""

    model: str
    level: str
    key: str  # "tpot_ms.p50"
    goal: float | None = None
    limit: float | None = None

    @property
    def less_is_better(self) -> bool:
        return not self.key.startswith("output")

    @property
    def unit(self) -> str:
        return {"ready_s": "s", "output_tokens_per_s": "output tok/s"}.get(self.key, "ms")

    @property
    def title(self) -> str:
        what = {"tpot_ms.p50": "time per output token", "ttft_ms.p50": "time to first token"}
        if self.level == "start":
            return "start to ready"
        streams, _, tokens = self.level.partition(": ")
        prompt, _, output = tokens.partition("/")
        load = f"{streams} stream{'s' * (streams != '1')}, {int(prompt):,} in, {output} out"
        return f"{load}: {what[self.key]}" if self.key in what else load

    def met(self, value: float) -> bool:
        assert self.goal is not None
        return value <= self.goal if self.less_is_better else value >= self.goal


TPOT, TTFT, RATE, READY = "tpot_ms.p50", "ttft_ms.p50", "output_tokens_per_s", "ready_s"
ONE, SOME, MANY, MOST = "1: 512/128", "32: 1024/128", "128: 1024/256", "256: 128/256"
ROWS = (
    Row("llama-3.1-8b", ONE, TPOT, 3.9, 1e3 * 15.0e9 / READ),
    Row("llama-3.1-8b", ONE, TTFT, 17),
    Row("llama-3.1-8b", SOME, RATE, 3100),
    Row("llama-3.1-8b", MANY, RATE, 6500),
    Row("llama-3.1-8b", MOST, RATE, 20000),
    Row("llama-3.1-8b", "start", READY, 12),
    Row("qwen3-30b-a3b", ONE, TPOT, 2.6, 1e3 * 6.6e9 / READ),
    Row("qwen3-30b-a3b", ONE, TTFT),
    Row("qwen3-30b-a3b", SOME, RATE, 2200),
    Row("qwen3-30b-a3b", MANY, RATE, 5500),
    Row("qwen3-30b-a3b", MOST, RATE, 13000),
    Row("qwen3-30b-a3b", "start", READY, 20),
    Row("llama-3.2-1b", ONE, TPOT, 1e3 * 2.47e9 / READ / 0.75, 1e3 * 2.47e9 / READ),
    Row("llama-3.2-1b", SOME, RATE),
    Row("llama-3.2-1b", MOST, RATE),
)

Result = dict[str, Any]
Found = dict[tuple[str, str], Result]


@dataclass(frozen=True, slots=True)
class Figure:
    row: Row
    ours: float
    peer: float | None

    @property
    def ratio(self) -> float | None:
        """How many times better than the peer."""
        if self.peer is None:
            return None
        return self.peer / self.ours if self.row.less_is_better else self.ours / self.peer

    @property
    def verdict(self) -> str:
        if self.row.goal is None:
            return ""
        return "met" if self.row.met(self.ours) else "**missed**"


def newest(files: Iterable[Path]) -> tuple[Found, list[Result]]:
    """The newest result of each model and load, and the records that they are from, the oldest first."""
    records = sorted((json.loads(file.read_text()) for file in files), key=lambda r: r["time"])
    found: Found = {}
    source: dict[tuple[str, str], Result] = {}
    for record in records:
        for result in record["results"]:
            key = result["model"], result["level"]
            found[key], source[key] = result, record
    used = [record for record in records if any(record is one for one in source.values())]
    return found, used


def value(results: Found, row: Row) -> float | None:
    found: Any = results.get((row.model, row.level), {})
    for name in row.key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return None if found is None else float(found)


def figures(results: Found, peer: Found) -> list[Figure]:
    made = ((row, value(results, row)) for row in ROWS)
    return [Figure(row, ours, value(peer, row)) for row, ours in made if ours is not None]


def caption(records: Sequence[Result]) -> str:
    devices = sorted({record["machine"]["device"].get("name", "?") for record in records})
    commits = dict.fromkeys(
        record["commit"][:7] + "+" * record["commit"].endswith("+") for record in records
    )
    return (
        f"One {', '.join(devices)}, bfloat16, made-up weights, 8,192 tokens of context, through HTTP; "
        f"commit {', '.join(commits)}; vLLM 0.24.0 on the same kind of machine with the same loads"
    )


def table(all_figures: Sequence[Figure], records: Sequence[Result]) -> str:
    lines = [f"{caption(records)}. In brackets: how many times better headrace is.", ""]
    lines += ["| | headrace | vLLM 0.24.0 | goal | | limit |", "|---|---|---|---|---|---|"]
    for one in all_figures:
        row = one.row
        peer = "" if one.peer is None else f"{number(one.peer)} ({one.ratio:.2f})"
        goal = "" if row.goal is None else number(row.goal)
        limit = "" if row.limit is None else number(row.limit)
        name = f"{TITLES[row.model]}, {row.title}, {row.unit}"
        lines.append(f"| {name} | {number(one.ours)} | {peer} | {goal} | {one.verdict} | {limit} |")
    return "\n".join([*lines, ""])


def panel(one: Figure, left: float, top: float) -> list[str]:
    row = one.row
    bars = {"headrace": one.ours}
    if one.peer is not None:
        bars["vLLM 0.24.0"] = one.peer
    marks = {"goal": row.goal, "limit": row.limit}
    most = max([*bars.values(), *(mark for mark in marks.values() if mark is not None)])
    room = WIDTH - LABEL - 52
    better = "less" if row.less_is_better else "more"
    parts = [
        f'<text class="t" x="{left}" y="{top + 14}">{escape(row.title)}</text>',
        f'<text class="u" x="{left}" y="{top + 31}">{row.unit}, {better} is better</text>',
    ]
    for line, (name, figure) in enumerate(bars.items()):
        y = top + HEAD + line * (BAR + 6)
        length = max(1.0, figure / most * room)
        parts += [
            f'<text text-anchor="end" x="{left + LABEL - 6}" y="{y + 14}">{name}</text>',
            f'<rect x="{left + LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" fill="{COLORS[name]}"/>',
            f'<text x="{left + LABEL + length + 5:.1f}" y="{y + 14}">{number(figure)}</text>',
        ]
    bottom = top + HEAD + len(bars) * (BAR + 6)
    for name, mark in marks.items():
        if mark is not None:
            x = left + LABEL + mark / most * room
            parts += [
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top + HEAD - 4}" y2="{bottom}" stroke="#868e96" '
                f'stroke-dasharray="{"4 3" if name == "goal" else "1 2"}"/>',
                f'<text class="u" text-anchor="middle" x="{x:.1f}" y="{bottom + 11}">{name}</text>',
            ]
    return parts


def svg(all_figures: Sequence[Figure], records: Sequence[Result]) -> str:
    height, columns = HEAD + 2 * (BAR + 6) + 30, 3
    parts, top = [], 14.0
    for model, title in TITLES.items():
        own = [one for one in all_figures if one.row.model == model]
        if not own:
            continue
        parts.append(f'<text class="t" x="14" y="{top + 10}">{title}</text>')
        top += 22
        for start in range(0, len(own), columns):
            for column, one in enumerate(own[start : start + columns]):
                parts += panel(one, 14 + column * (WIDTH + GAP), top)
            top += height
    parts.append(f'<text class="u" x="14" y="{top + 6}">{escape(caption(records))}</text>')
    width = 28 + columns * WIDTH + (columns - 1) * GAP
    size = f'viewBox="0 0 {width} {top + 20:.0f}" width="{width}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    head += "<title>headrace and vLLM on one NVIDIA H200</title>"
    back = f'<rect class="bg" width="{width}" height="{top + 20:.0f}"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", back, *parts, "</svg>"]) + "\n"


def between(text: str, part: str) -> str:
    """`text` with `part` between the lines BEGIN and END. ValueError where they are not there."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no lines {BEGIN} and {END}")
    return f"{before}{begin}\n{part}{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, nargs="+", help="files of results instead")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the table and picture")
    parser.add_argument("--readme", type=Path, nargs="*", default=list(READMES))
    options = parser.parse_args()
    files = options.json or sorted(set(RESULTS.glob("cuda-h200*.json")) - {PEER})
    results, records = newest(files)
    peer = {(r["model"], r["level"]): r for r in json.loads(PEER.read_text())["results"]}
    shown = figures(results, peer)
    text = table(shown, records)
    options.out.mkdir(parents=True, exist_ok=True)
    for suffix, content in ((".md", text), (".svg", svg(shown, records))):
        file = options.out / f"cuda-h200{suffix}"
        file.write_text(content)
        print(file)
    for file in options.readme:
        file.write_text(between(file.read_text(), text))
        print(file)


if __name__ == "__main__":
    main()
