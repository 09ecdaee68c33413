"""What a start costs: seconds to ready and to the first token, memory of all processes, processor share when idle."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from headrace.cli.api import Address
from headrace.cli.bench.client import call, completion
from headrace.cli.errors import RUNTIME, CliError
from headrace.cli.private import serve_command, stop, wait_ready
from headrace.engine.config.flag import Given

PROMPT = "Once upon a time"
SETTLE_SECONDS = 2.0  # after the last request, before the idle share is measured


def measure(model: str, given: Sequence[Given], config: str, idle_seconds: float) -> dict[str, Any]:
    """One start, from creating the process to stopping it.

    ready_s: process start to the first 200 of /ready. first_token_s: sending the first request to its first text.
    resident_bytes: all processes together, memory that they share counted once (PSS); rss_bytes: the plain sum.
    idle_cpu_percent: of one core, all processes, over `idle_seconds`.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        where = Address("http://localhost", str(Path(folder, "api.sock")))
        command = serve_command(model, given, config, ("--uds", where.uds), quiet=True)
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            wait_ready(where, process)
            ready = time.perf_counter() - began
            first = asyncio.run(_first_token(where))
            family = [
                psutil.Process(process.pid),
                *psutil.Process(process.pid).children(recursive=True),
            ]
            memory = {f"{p.pid} {p.name()}": _resident(p) for p in family}
            rss = sum(p.memory_info().rss for p in family)
            time.sleep(SETTLE_SECONDS)
            idle = _cpu_share(family, idle_seconds)
        finally:
            stop(process)
    return {
        "ready_s": round(ready, 3),
        "first_token_s": round(first, 3),
        "processes": len(family),
        "resident_bytes": sum(memory.values()),
        "resident_bytes_by_process": memory,
        "rss_bytes": rss,
        "idle_cpu_percent": round(idle * 100, 2),
        "idle_seconds": idle_seconds,
    }


async def _first_token(where: Address) -> float:
    names = await _model_name(where)
    body = {"model": names, "prompt": PROMPT, "max_tokens": 8, "stream": True, "temperature": 0.0}
    sample = await completion(where, body, timeout=120.0)
    if sample.error:
        raise CliError(f"the first request failed: {sample.error}", RUNTIME)
    return sample.ttft


async def _model_name(where: Address) -> str:
    models = await call(where, "/v1/models", None)
    if not models:
        raise CliError(f"the server at {where} lists no models", RUNTIME)
    return str(models["data"][0]["id"])


def _resident(process: psutil.Process) -> int:
    """Proportional share where the system tells it (memory shared by processes counts once), else resident size."""
    full = process.memory_full_info()
    return int(getattr(full, "pss", 0) or full.rss)


def _cpu_share(family: Sequence[psutil.Process], seconds: float) -> float:
    def used() -> float:
        return sum(sum(p.cpu_times()[:2]) for p in family)

    before, began = used(), time.perf_counter()
    time.sleep(seconds)
    return (used() - before) / (time.perf_counter() - began)
