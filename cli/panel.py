"""What a server that has become ready says of itself: model, device, memory, kernels, time, address."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from headrace.cli.facts import kv_arithmetic, model_line, quantization, why
from headrace.cli.prepare import Plan
from headrace.cli.progress import process_seconds
from headrace.engine.config.sizes import format_bytes, format_count
from headrace.engine.ipc.messages import EngineReady
from headrace.engine.server.names import ModelNames
from headrace.engine.server.sockets import url_of
from headrace.engine.text.fast import FastTokenizer

# Engine phase -> its name in the panel; phases of one name are added.
PHASE_NAMES = {
    "import": "libraries",
    "open": "device",
    "load": "weights",
    "measure": "memory",
    "kv": "KV",
    "init_kv": "KV",
    "warm-up": "warm-up",
    "warm_up": "warm-up",
}


def show(
    plan: Plan, info: EngineReady, sock: socket.socket, tokenizer: FastTokenizer, settled: float
) -> None:
    """Print the panel to standard output: framed on a terminal, "name: text" lines elsewhere.

    `settled`: seconds from the process's start until it was known what to run.
    """
    rows = facts(plan, info, url_of(sock), tokenizer, settled)
    if not sys.stdout.isatty():
        for name, text in rows:
            print(f"{name}: {text}" if name else f"  {text}")
        sys.stdout.flush()
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    *framed, (_, example) = rows
    for name, text in framed:
        grid.add_row(name, Text(text, style="" if name else "dim"))
    title = f"headrace {version('headrace')}"
    console = Console()
    console.print(Panel(grid, title=title, title_align="left", border_style="cyan", expand=False))
    console.print(Text(example), soft_wrap=True)  # no frame, no line breaks: it can be copied


def facts(
    plan: Plan, info: EngineReady, url: str, tokenizer: FastTokenizer, settled: float
) -> list[tuple[str, str]]:
    """(name, text) in the order shown; a row without a name belongs to the one above."""
    chats = tokenizer.chat_template is not None
    name = ModelNames(plan.files.name, plan.config.server.served_model_names).first
    shortened = [note for note in info.notes if note.startswith("context of ")]
    context = f"{format_count(info.max_model_len)} tokens{why(plan.config, 'model.max_model_len')}"
    rows = [
        ("model", model_line(plan)),
        *(("tokenizer", note) for note in tokenizer.notes),
        ("device", _device(info, plan)),
        ("dtype", f"{info.dtype}{why(plan.config, 'model.dtype')}"),
        *quantization(plan),
        ("context", context),
        *(("", note) for note in shortened),
        ("KV cache", _kv(plan, info)),
        *(("", note) for note in info.notes if note not in shortened),
        *_memory(info),
        ("kernels", kernels(info.selection)),
        *_graphs(info, plan),
        ("ready in", _times(info.phases, settled, process_seconds())),
        ("URL", url if url.startswith("unix:") else f"{url}/v1"),
        ("try", curl(url, name, chats, bool(plan.config.server.api_keys))),
    ]
    return rows


def _device(info: EngineReady, plan: Plan) -> str:
    world = f" x {info.world}" if info.world > 1 else ""
    return (
        f"{info.device}{world} {info.device_name} ({plan.device.arch}, {plan.device.units} units)"
    )


def _kv(plan: Plan, info: EngineReady) -> str:
    return (
        f"{format_bytes(info.kv_bytes)} for {format_count(info.kv_tokens)} tokens; "
        f"{kv_arithmetic(plan.spec, info.kv_dtype, info.world)}"
    )


def _memory(info: EngineReady) -> list[tuple[str, str]]:
    """What was free on each device, and what became of it."""
    if not info.free_bytes:
        return []
    parts = {
        "weights": info.weight_bytes,
        "for a step and graphs" if info.graphs else "for a step": info.step_bytes,
        "KV cache": info.kv_bytes,
        "left": info.free_bytes - info.weight_bytes - info.step_bytes - info.kv_bytes,
    }
    total = f"{format_bytes(info.free_bytes)} free at start{' on each' if info.world > 1 else ''}"
    terms = (f"{format_bytes(max(size, 0))} {name}" for name, size in parts.items())
    return [("memory", f"{total} = {' + '.join(terms)}")]


def _graphs(info: EngineReady, plan: Plan) -> list[tuple[str, str]]:
    if plan.config.graphs.eager:
        return [("graphs", "none (--enforce-eager)")]
    text = f"{info.graphs}, each captured when the server is idle or needs it"
    return [("graphs", text)] if info.graphs else []


def kernels(selection: Iterable[Mapping[str, Any]]) -> str:
    """Chosen implementations with their ops: "torch: linear, rms_norm; reference: sample"."""
    grouped: dict[str, list[str]] = {}
    for row in selection:
        ops = grouped.setdefault(row["chosen"], [])
        if row["op"] not in ops:
            ops.append(row["op"])
    return "; ".join(f"{name}: {', '.join(ops)}" for name, ops in grouped.items())


def _times(phases: Mapping[str, float], settled: float, total: float) -> str:
    """Total and its parts; what no phase counts is the rest of the engine process's imports."""
    named: dict[str, float] = {"settings": settled}
    named["libraries"] = max(0.0, total - settled - sum(phases.values()))
    for phase, seconds in phases.items():
        name = PHASE_NAMES.get(phase, phase)
        named[name] = named.get(name, 0.0) + seconds
    parts = ", ".join(
        f"{name} {seconds:.2f}" for name, seconds in named.items() if seconds >= 0.005
    )
    return f"{total:.2f} s ({parts})"


def curl(url: str, model: str, chats: bool, guarded: bool) -> str:
    """A command that asks the server something."""
    body: dict[str, Any] = {"model": model}
    if chats:
        path = "chat/completions"
        body["messages"] = [{"role": "user", "content": "Hello!"}]
    else:
        path = "completions"
        body |= {"prompt": "Once upon a time", "max_tokens": 32}
    where = [f"{url}/v1/{path}"]
    if url.startswith("unix:"):
        where = ["--unix-socket", url.removeprefix("unix:"), f"http://localhost/v1/{path}"]
    key = ' -H "Authorization: Bearer $HEADRACE_API_KEY"' if guarded else ""
    return (
        f"curl {shlex.join(where)} -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(json.dumps(body))}"
    )
