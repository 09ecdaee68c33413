"""Where the time of a step goes for each load of the comparison, kernel by kernel against the device's limits.

python -m benchmarks.cuda.profiles --models llama-3.1-8b,qwen3-30b-a3b --json benchmarks/results/cuda-profile.json
python -m benchmarks.cuda.profiles --page      # docs/benchmarks/cuda-h200-profile.md from that file
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cuda.models import write
from benchmarks.cuda.plot import DOCS, RESULTS, TITLES
from benchmarks.cuda.run import device, served, settle
from headrace.cli.bench.profile import HOST, grouped, summary
from headrace.cli.bench.record import record, write_json

KEPT = RESULTS / "cuda-profile.json"
PAGE = DOCS / "cuda-h200-profile.md"
# what a step of each load is: requests, tokens that each has (prompt and half of the answer), tokens read more of each,
# requests that decode beside them
STEPS = (
    ("1 stream", 1, 576, 0, 0),
    ("32 streams", 32, 1088, 0, 0),
    ("128 streams", 128, 1152, 0, 0),
    ("256 streams", 256, 256, 0, 0),
    ("the prompt of one stream", 1, 0, 512, 0),
    ("a prompt beside 120 streams", 1, 1024, 904, 120),
    ("prompts of 4,096 tokens together", 4, 0, 1024, 0),
)
LEAST_SHARE = 0.005  # ops with less of a step are told in one line


def measure(name: str, folder: Path, extra: Sequence[str], log: Path) -> Iterator[dict[str, Any]]:
    with served(write(name, folder), list(extra), log) as (where, ready):
        yield {"model": name, "what": "start", "ready_s": round(ready, 2)}
        settle(where)
        for what, requests, context, prompt, decodes in STEPS:
            sizes = {"requests": requests, "context": context, "prompt": prompt, "decodes": decodes}
            answer = httpx.get(f"{where.url}/debug/step", params=sizes, timeout=120)
            if answer.status_code != 200:
                yield {"model": name, "what": what, "error": answer.json()["error"]["message"]}
                continue
            rows = grouped(answer.json())
            yield {"model": name, "what": what, **summary(answer.json(), rows), "ops": rows}


def page(kept: Mapping[str, Any]) -> str:
    machine, commit = kept["machine"]["device"].get("name", "?"), kept["commit"][:7]
    lines = [
        "# Where the time goes",
        "",
        f"One {machine}, bfloat16, made-up weights, commit {commit}; made by "
        "`python -m benchmarks.cuda.profiles`. The limit of an op is the time in which its bytes are read at the "
        "bandwidth, or its operations done at the rate, that the device showed in the same run; more than 100 % says "
        "that a cache helped. An op's kernels may begin while those before them end, so shares can exceed the whole.",
    ]
    for one in kept["results"]:
        if one["what"] == "start":
            continue
        lines += ["", f"## {TITLES[one['model']]}: {one['what']}", ""]
        lines += [one["error"]] if "error" in one else _step(one)
    return "\n".join([*lines, ""])


def _step(one: Mapping[str, Any]) -> list[str]:
    ms = 1e3 * one["step_s"]
    text = f"{ms:.2f} ms a step, {one['tokens_per_s']:,.0f} tokens/s"
    if one["limit_s"]:
        text += (
            f"; the limit is {1e3 * one['limit_s']:.2f} ms ({one['of_limit']:.0%} of it reached)"
        )
    host = ", ".join(f"{name} {1e3 * one['host'][name]:.2f}" for name in HOST)
    text += f". The host's work: {1e3 * one['host_s']:.2f} ms ({host})"
    text += ", hidden behind the device." if one["hidden"] else ", not hidden."
    lines = [text, "", "| op | sizes | kernel | calls | ms | share | limit ms | of limit |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    rest = [row for row in one["ops"] if row["share"] < LEAST_SHARE]
    for row in one["ops"]:
        if row["share"] < LEAST_SHARE:
            continue
        kernel = f"`{row['kernels'][0][0][:44]}`" if row["kernels"] else ""
        limit = "" if row["limit_s"] is None else f"{1e3 * row['limit_s']:.3f}"
        of = "" if row["of_limit"] is None else f"{row['of_limit']:.0%}"
        lines.append(
            f"| {row['op']} | {row['detail']} | {kernel} | {row['count']} | {1e3 * row['seconds']:.3f} | "
            f"{row['share']:.1%} | {limit} | {of} |"
        )
    if rest:
        seconds = sum(row["seconds"] for row in rest)
        lines.append(f"| {len(rest)} others | | | | {1e3 * seconds:.3f} | | | |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="llama-3.1-8b", help="names, separated by commas")
    parser.add_argument("--json", default="", help="write the figures to this file")
    parser.add_argument("--commit", default="", help="where the checkout has no git to ask")
    parser.add_argument("--page", action="store_true", help="write the page from what is kept")
    parser.add_argument("extra", nargs="*", help="more options of `headrace serve`, after --")
    asked = parser.parse_args()
    if asked.page:
        PAGE.write_text(page(json.loads(KEPT.read_text())))
        print(PAGE)
        return
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in asked.models.split(","):
            for one in measure(name, Path(scratch), asked.extra, Path(scratch) / f"{name}.log"):
                results.append(one)
                ms = 1e3 * (one.get("step_s") or one.get("ready_s", 0))
                print(name, one["what"], one.get("error") or f"{ms:.2f} ms", flush=True)
    report = record(
        "benchmarks.cuda.profiles", {"models": asked.models, "serve": asked.extra}, results
    )
    report["machine"]["device"] = device()
    report["commit"] = asked.commit or report["commit"]
    if asked.json:
        write_json(asked.json, report)


if __name__ == "__main__":
    main()
