"""What the server's processes do for a step, by the operating system's account of their threads: Linux only.

Streams run; in a window in which all of them decode, the processor time of the API process, of the engine's thread
and of the engine process's other threads is divided by the steps that were made.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from headrace.cli.api import Address
from headrace.cli.bench.client import Sample, completion
from headrace.cli.bench.prompts import prepare
from headrace.cli.errors import RUNTIME, CliError

DECODING = 3.0  # seconds that all streams should decode together
LEAST, TRIES = 96, 3  # tokens of each answer at first
SECONDS = 0.1  # between two looks at the threads
TIMEOUT = 600.0
ROLES = {
    "engine": "plans, results, messages",
    "worker": "the engine process's other threads",
    "api": "detokenizing, streams",
}

Times = Mapping[str, float]


def can_be_seen() -> bool:
    return Path("/proc/self/schedstat").exists()


def measure(where: Address, model: str, step: Mapping[str, Any]) -> dict[str, Any] | None:
    """Seconds of processor time a step by role, for the load of `step`, an answer of /debug/step; None when no window
    was long enough."""
    context, room = max(step["context"], 1), step["max_model_len"] - step["context"] - 1
    tokens = max(LEAST, int(DECODING / step["step_s"]))
    for _ in range(TRIES):  # the last prompt may have been read when the first stream was over
        sizes = context, max(1, min(room, tokens))
        found = shares(*asyncio.run(_streams(where, model, step["requests"], sizes)))
        if found is not None or tokens >= room:
            return found
        tokens *= 3
    return None


async def _streams(
    where: Address, model: str, requests: int, sizes: tuple[int, int]
) -> tuple[list[Sample], list[tuple[float, Times]]]:
    context, tokens = sizes
    prompts = await prepare(where, model, context, 0, f"profile {time.time_ns()}")
    bodies = [
        {
            "model": model,
            "prompt": await prompts.make(number),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for number in range(requests)
    ]
    looks: list[tuple[float, Times]] = []
    watching = asyncio.create_task(_watch(looks))
    samples = await asyncio.gather(*(completion(where, body, TIMEOUT) for body in bodies))
    watching.cancel()
    failed = next((one.error for one in samples if one.error), "")
    if failed:
        raise CliError(f"a stream of the profile failed: {failed}", RUNTIME)
    return list(samples), looks


async def _watch(looks: list[tuple[float, Times]]) -> None:
    while True:
        looks.append((time.perf_counter(), processor_times(psutil.Process())))
        await asyncio.sleep(SECONDS)


def processor_times(parent: psutil.Process) -> dict[str, float]:
    """By role, of the server that is a child of `parent` and of its engine, a child of that."""
    found = dict.fromkeys(ROLES, 0.0)
    for server in parent.children():
        found["api"] += sum(_threads(server.pid).values())
        for engine in server.children():
            for thread, seconds in _threads(engine.pid).items():
                found["engine" if thread == engine.pid else "worker"] += seconds
    return found


def _threads(process: int) -> dict[int, float]:
    """Seconds that each thread has run, as the scheduler counts them: in nanoseconds."""
    found = {}
    for task in Path(f"/proc/{process}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may have ended meanwhile
            found[int(task.parent.name)] = 1e-9 * int(task.read_text().split()[0])
    return found


def shares(
    samples: Sequence[Sample], looks: Sequence[tuple[float, Times]]
) -> dict[str, Any] | None:
    """Between the last stream's first token and the first stream's last one."""
    began = max(one.chunks[0] for one in samples)
    ended = min(one.chunks[-1] for one in samples)
    inside = [look for look in looks if began <= look[0] <= ended]
    if len(inside) < 2 or inside[-1][0] - inside[0][0] < DECODING / 3:
        return None
    (first, before), (last, after) = inside[0], inside[-1]
    rate = 1 / median(one.tpot or float("inf") for one in samples)
    steps = (last - first) * rate
    used = {role: (after[role] - before[role]) / steps for role in ROLES}
    return {"requests": len(samples), "steps": round(steps), "step_s": 1 / rate, **used}


def line(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "the streams were over too soon to see what the processes do; raise --max-model-len"
    parts = ", ".join(f"{role} ({ROLES[role]}) {1e3 * found[role]:.3f}" for role in ROLES)
    return f"served over HTTP, {1e3 * found['step_s']:.2f} ms a step; processor time, ms a step: {parts}"
