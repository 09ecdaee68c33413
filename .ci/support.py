"""Makes docs/support.md: what runs natively where, from the platforms' own verdicts and from the records of runs.

    python .ci/support.py           write the page
    python .ci/support.py --check   exit 1 when it is not what this would write

Run from the repository root, with the packages of the README's second command.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.platforms.collectives import OP as COLLECTIVES
from headrace.platforms.device import DeviceInfo
from headrace.platforms.platform import Platform
from headrace.platforms.queries import (
    ActivationQuery,
    AttentionQuery,
    EmbeddingQuery,
    ExpertsQuery,
    GroupQuery,
    LinearQuery,
    NormQuery,
    RotaryQuery,
    RouterQuery,
    SampleQuery,
)
from headrace.platforms.registry import REFERENCE, Policy, Registry, SelectionError, select

PAGE = Path("docs/support.md")
RECORDS = Path("docs/verified.json")  # runs from before there was a report for them
REPORTS = Path("benchmarks/results")  # reports of `headrace conformance` among them

GROUP = '[project.entry-points."headrace.platforms"]\n'

HEAD = """# What runs where

Made by `python .ci/support.py` from the verdicts of every implementation on every described device; do not edit.

- **name**: a native implementation, on an architecture on which the project ran it ("Where it was run", below)
- name: an implementation that is used without such a run: PyTorch's own operators, the host's kernels, or a build for
  older processors that was run on a newer one
- name?: a native implementation that the project never ran on such hardware; at start it must agree with the reference
  on generated inputs, or the reference serves
- reference: plain PyTorch on the device; sums over devices through the host
- no: the model cannot run so; quantized weights are then dequantized when they are loaded

In the device's preferred dtype, with the packages installed that an implementation asks for. `headrace explain MODEL
--device PLATFORM:ARCH` says the same of a model, with every reason; `headrace conformance` tests it on a machine and
writes the report that moves an entry to the first kind.
"""


def rows(dtype: str) -> list[tuple[str, str, Any]]:
    """(words, op, query): ops, and the features of models that an implementation may lack."""

    def attention(*shape: int, kv: str = dtype, **options: Any) -> AttentionQuery:
        heads, kv_heads, size = shape
        return AttentionQuery(heads, kv_heads, size, size, dtype, kv, size**-0.5, **options)

    def latent() -> AttentionQuery:
        return AttentionQuery(16, 1, 576, 512, dtype, dtype, 192**-0.5, latent=True)

    def linear(scheme: str = "") -> LinearQuery:
        return LinearQuery(4096, 14336, dtype, scheme)

    def experts(*schemes: str) -> ExpertsQuery:
        return ExpertsQuery(128, 8, 2048, 768, dtype, *schemes)

    grouped = RouterQuery(256, 8, True, "sigmoid", groups=8, top_groups=4, bias=True, scale=2.5)
    op = "paged_attention"
    return [
        ("attention", op, attention(32, 8, 128)),
        ("attention, sliding window", op, attention(32, 8, 128, window=4096)),
        ("attention, soft cap", op, attention(8, 4, 256, softcap=50.0)),
        ("attention, sinks", op, attention(64, 8, 64, window=128, sinks=True)),
        ("attention, heads of 80", op, attention(32, 32, 80)),
        ("latent attention (MLA)", op, latent()),
        ("attention, KV in int8", op, attention(32, 8, 128, kv="int8")),
        ("attention, KV in fp8", op, attention(32, 8, 128, kv="fp8_e4m3")),
        ("linear", "linear", linear()),
        *((f"linear, {name} weights", "linear", linear(name)) for name in ("Q4_0", "Q8_0", "Q4_K")),
        ("embedding", "embedding", EmbeddingQuery(128256, 4096, dtype)),
        ("RMS norm", "rms_norm", NormQuery(4096, dtype)),
        ("add and RMS norm", "fused_add_rms_norm", NormQuery(4096, dtype)),
        ("rotary embedding", "rotary_embedding", RotaryQuery(128, 128, dtype)),
        ("SiLU and multiply", "silu_and_mul", ActivationQuery(14336, dtype)),
        ("GELU (tanh) and multiply", "gelu_tanh_and_mul", ActivationQuery(14336, dtype)),
        ("router", "topk_softmax", RouterQuery(128, 8, True)),
        ("router, sigmoid and groups", "topk_softmax", grouped),
        ("experts", "fused_experts", experts()),
        ("experts, Q4_K and Q6_K weights", "fused_experts", experts("Q4_K", "Q6_K")),
        ("sampling", "sample", SampleQuery(128256, 64)),
        ("sums over 2 devices", COLLECTIVES, GroupQuery(2)),
    ]


def platforms() -> list[Platform]:
    """The built-in ones as pyproject.toml names them, the preferred one first, the CPU last."""
    _, _, section = Path("pyproject.toml").read_text().partition(GROUP)
    targets = re.findall(r'^\w+ = "([\w.]+):(\w+)"$', section.partition("\n[")[0], re.MULTILINE)
    made = []
    for module, name in targets:
        made.append(getattr(importlib.import_module(module), name)())
    return sorted(made, key=lambda platform: (-platform.priority, platform.name))


def cell(op: str, query: Any, device: DeviceInfo, registry: Registry, was_run: bool) -> str:
    try:
        decision = select(op, query, device, registry, Policy(), versions=lambda _: "9999")
    except SelectionError:
        return "no"
    if decision.chosen == REFERENCE:
        return REFERENCE
    verdict = next(row for row in decision.candidates if row.name == decision.chosen)
    if verdict.status != "yes":
        return f"{decision.chosen}?"
    return f"**{decision.chosen}**" if was_run else decision.chosen


def table(platform: Platform) -> Iterable[str]:
    devices = [platform.describe(arch) for arch in platform.known_archs()]
    registry = Registry.with_reference(platform.implementations())
    ran = {
        row["arch"]
        for row in records()
        if row["platform"] == platform.name and not row.get("failed")
    }
    yield from line("", *(device.arch for device in devices))
    yield from line(*["---"] * (1 + len(devices)))
    yield from line("for example", *(device.name for device in devices))
    yield from line("dtypes", *(", ".join(device.dtypes) for device in devices))
    for number, (words, op, _) in enumerate(rows("float32")):
        cells = []
        for device in devices:
            query = rows(device.dtypes[0])[number][2]
            cells.append(cell(op, query, device, registry, device.arch in ran))
        yield from line(words, *cells)


def line(*cells: str) -> Iterable[str]:
    yield f"| {' | '.join(cells)} |"


def records() -> list[Mapping[str, Any]]:
    """Runs on real hardware: those noted by hand, and the conformance reports that are kept."""
    found = list(json.loads(RECORDS.read_text()))
    for path in sorted(REPORTS.glob("*.json")):
        report = json.loads(path.read_text())
        if not isinstance(report, dict) or report.get("command") != "conformance":
            continue
        device, skipped = report["device"], report["skipped"]
        found.append(
            {
                "platform": device["platform"],
                "arch": device["arch"],
                "where": device["name"],
                "when": report["time"][:10],
                "commit": report["commit"],
                "failed": report["failed"],
                "what": f"conformance: {report['passed']} cases passed, {report['failed']} failed, {skipped} "
                f"tests skipped ([report](../{path}))",
            }
        )
    return sorted(found, key=lambda row: (row["platform"], row["arch"], row["when"]))


def page() -> str:
    lines = [HEAD]
    for platform in platforms():
        lines += [f"## {platform.name}", "", *table(platform), ""]
    lines += ["## Where it was run", ""]
    lines += [*line("device", "arch", "when", "commit", "what"), *line(*["---"] * 5)]
    for row in records():
        commit = row["commit"][:7] + ("+" if row["commit"].endswith("+") else "")
        where = f"{row['platform']}: {row['where']}"
        lines += line(where, row["arch"], row["when"], commit, row["what"])
    return "\n".join(lines) + "\n"


def main() -> int:
    text = page()
    if sys.argv[1:] == ["--check"]:
        if PAGE.read_text() == text:
            return 0
        print(f"{PAGE} is stale: run python .ci/support.py and look at the difference")
        return 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
