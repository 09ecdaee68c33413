"""`headrace explain`: the choice of implementations for a model on a device, and the memory of its KV cache.

Nothing is loaded and nothing runs: selection is a pure function of data, so the device may be described only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.configure import configure, find_device
from headrace.cli.errors import CliError
from headrace.cli.facts import (
    kv_arithmetic,
    kv_bytes_per_token,
    kv_specs,
    model_line,
    quantization,
    why,
)
from headrace.cli.prepare import Plan, decide, prepare
from headrace.engine.config import env
from headrace.engine.config.flag import Given
from headrace.engine.config.sizes import format_bytes, format_count
from headrace.engine.kv_cache.plan import KVPlanError, choose_context, item_bytes
from headrace.engine.models.registry import model_shape
from headrace.platforms import tuned
from headrace.platforms.kv_layout import CANONICAL, KVFormat
from headrace.platforms.registry import Candidate, Decision

STATUS_STYLE = {"yes": "green", "unverified": "yellow", "no": "red"}


def run(model: str, given: Sequence[Given], config: str, as_json: bool) -> None:
    settings = configure(model, given, config)
    plan = prepare(settings, find_device(settings, described=True), weightless=True)
    decisions = decide(plan)
    facts = _facts(plan)
    if as_json:
        print(json.dumps({**facts, "ops": [_plain(row) for row in decisions]}, indent=2))
        return
    console = Console()
    _show_facts(console, plan, facts)
    console.print(_table(decisions))
    for warning in facts["warnings"]:
        console.print(Text(f"warning: {warning}", style="yellow"))


def _facts(plan: Plan) -> dict[str, Any]:
    shape, measured = model_shape(plan.spec), _tuned(plan)
    problem = measured.pop("problem")
    return {
        "model": plan.files.name,
        "architecture": plan.spec.architecture,
        "parameters": shape.parameters,
        "scheme": plan.spec.scheme or plan.spec.dtype,
        "device": {
            "spec": plan.device.spec,
            "name": plan.device.name,
            "arch": plan.device.arch,
            "features": sorted(plan.device.features),
            "memory": plan.device.memory,
            "units": plan.device.units,
            "present": plan.present,
        },
        "dtype": plan.config.model.dtype,
        "kv": _kv(plan),
        "tuned": measured,
        "settings": [asdict_struct(row) for row in plan.config.provenance],
        "warnings": [*plan.warnings, *([problem] if problem else [])],
    }


def _kv(plan: Plan) -> dict[str, Any]:
    """KV bytes a token and the longest context that the KV memory holds."""
    specs = kv_specs(plan.spec, plan.kv_dtype, plan.config.device.tensor_parallel_size)
    cache = plan.config.cache
    form = KVFormat(CANONICAL, preferred_block_size=cache.block_size or 32)
    budget = cache.kv_cache_memory or max(
        0,
        int(plan.device.memory * cache.memory_utilization)
        - model_shape(plan.spec).parameters * item_bytes(plan.config.model.dtype),
    )
    try:
        choice = choose_context(
            specs,
            [[form]] * len(specs),
            budget,
            cache,
            plan.config.model.max_model_len,
            plan.spec.max_position,
            plan.config.scheduler.max_num_batched_tokens or plan.spec.max_position,
        )
    except KVPlanError as error:
        raise CliError(str(error)) from None
    full = [spec for spec in specs if not spec.window]
    return {
        "dtype": plan.kv_dtype,
        "bytes_per_token": kv_bytes_per_token(specs),
        "layers_full": len(full),
        "layers_window": len(specs) - len(full),
        "window": max((spec.window for spec in specs), default=0),
        "kv_heads": specs[0].kv_heads,
        "head_dim": specs[0].head_dim,
        "budget_bytes": budget,
        "max_model_len": choice.max_model_len,
        "note": choice.note,
    }


def _tuned(plan: Plan) -> dict[str, Any]:
    """The file of measured launch options that a start on this device takes."""
    path = env.tuned_file(plan.device.name)
    found = tuned.read(path, plan.device.name)
    return {
        "file": str(path) if found.options else "",
        "made": found.made,
        "entries": len(found.options),
        "problem": found.problem,
    }


def _show_facts(console: Console, plan: Plan, facts: Mapping[str, Any]) -> None:
    kv, device = facts["kv"], facts["device"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    where = "" if plan.present else " (described; not on this machine)"
    rows = {
        "model": model_line(plan),
        "device": f"{device['spec']} {device['name']}, {device['arch']}, {format_bytes(device['memory'])}{where}",
        "dtype": f"{facts['dtype']}{why(plan.config, 'model.dtype')}",
        "KV a token": kv_arithmetic(
            plan.spec, plan.kv_dtype, plan.config.device.tensor_parallel_size
        ),
        "KV cache": f"{format_bytes(kv['budget_bytes'])}{why(plan.config, 'cache.kv_cache_memory')}",
        "context": f"{format_count(kv['max_model_len'])} tokens"
        + (f" ({kv['note']})" if kv["note"] else ""),
    }
    rows |= dict(quantization(plan))
    if facts["tuned"]["file"]:
        rows["tuned"] = "launch options of {entries} kernels, {file} ({made})".format(
            **facts["tuned"]
        )
    for name, text in rows.items():
        grid.add_row(name, Text(text))
    console.print(grid)


def _table(decisions: Sequence[Decision]) -> Table:
    """One section for each op; its queries that were decided alike are shown once, the chosen row first."""
    table = Table("op", "implementation", "verdict", "rank", "why")
    groups: dict[tuple[str, str, tuple[Candidate, ...]], list[Decision]] = {}
    order = list(dict.fromkeys(decision.op for decision in decisions))
    for decision in sorted(decisions, key=lambda row: order.index(row.op)):
        key = (decision.op, decision.chosen, decision.candidates)
        groups.setdefault(key, []).append(decision)
    split = {op for op, _, _ in groups if sum(op == other for other, _, _ in groups) > 1}
    for (op, chosen, candidates), alike in groups.items():
        table.add_section()
        if op in split:
            queries = "; ".join(describe_query(row.query) for row in alike)
            table.add_row(op, "", "", "", Text(queries, style="dim"))
        for number, row in enumerate(sorted(candidates, key=lambda c: (c.name != chosen, -c.rank))):
            best = row.name == chosen
            forced = ("forced",) if best and alike[0].forced else ()
            table.add_row(
                op if number == 0 and op not in split else "",
                Text(f"{'->' if best else '  '} {row.name}", style="bold" if best else ""),
                Text(row.status, style=STATUS_STYLE[row.status]),
                str(row.rank),
                Text("; ".join((*forced, *row.reasons))),
            )
    return table


def describe_query(query: Any) -> str:
    """A query's fields that differ from their defaults: "in_features=576, out_features=192, dtype=bfloat16"."""
    if not is_dataclass(query) or isinstance(query, type):
        return str(query)
    fields = asdict(query)
    defaults = {name: field.default for name, field in query.__dataclass_fields__.items()}
    return ", ".join(f"{name}={value}" for name, value in fields.items() if value != defaults[name])


def _plain(decision: Decision) -> dict[str, Any]:
    return {
        "op": decision.op,
        "query": asdict(decision.query),
        "chosen": decision.chosen,
        "forced": decision.forced,
        "candidates": [asdict(row) for row in decision.candidates],
    }


def asdict_struct(row: Any) -> dict[str, Any]:
    import msgspec

    return dict(msgspec.to_builtins(row))
