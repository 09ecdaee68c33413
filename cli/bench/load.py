"""The load: requests at a fixed concurrency or at a random arrival rate, and what is computed from them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.cli.api import Address
from headrace.cli.bench.client import Sample, completion
from headrace.cli.bench.prompts import Prompts, prepare

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Load:
    """One level of load. Either `concurrency` requests are always under way, or they arrive at `rate` a second."""

    prompt_tokens: int = 128
    output_tokens: int = 128
    requests: int = 16
    concurrency: int = 1  # with a rate: the most under way, 0 = no limit
    rate: float = 0.0
    warmup: int = 1
    shared_prefix: int = 0
    temperature: float = 0.0
    seed: str = "0"
    timeout: float = 600.0


async def run(
    where: Address,
    model: str,
    load: Load,
    progress: Callable[[int], None] = lambda _done: None,
    prompts: Prompts | None = None,
) -> dict[str, Any]:
    """Send the load and return its summary. `progress` is told the number of requests that have finished. `prompts`
    may come from another server of the same vocabulary: then both are sent the same token ids."""
    prompts = prompts or await prepare(
        where, model, load.prompt_tokens, load.shared_prefix, load.seed
    )
    for number in range(load.warmup):
        body = _body(model, load, await prompts.make(-2 - number))
        await completion(where, {**body, "max_tokens": min(8, load.output_tokens)}, load.timeout)
    bodies = [_body(model, load, await prompts.make(number)) for number in range(load.requests)]
    cpu = time.process_time()
    samples = await _send(where, bodies, load, progress)
    summary = summarise(samples)
    return {**summary, "client_cpu_s": round(time.process_time() - cpu, 3)}


def _body(model: str, load: Load, prompt: Any) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.output_tokens,
        "temperature": load.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _send(
    where: Address, bodies: Sequence[dict[str, Any]], load: Load, progress: Callable[[int], None]
) -> list[Sample]:
    """All requests: closed loop, or open loop with exponential gaps between arrivals."""
    gate = asyncio.Semaphore(load.concurrency or len(bodies))
    gaps = random.Random(load.seed)
    samples: list[Sample] = []

    async def one(body: dict[str, Any]) -> None:
        async with gate:
            samples.append(await completion(where, body, load.timeout))
        progress(len(samples))

    tasks = []
    for body in bodies:
        tasks.append(asyncio.create_task(one(body)))
        if load.rate:
            await asyncio.sleep(gaps.expovariate(load.rate))
    await asyncio.gather(*tasks)
    return samples


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks. `values` is not empty."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarise(samples: Sequence[Sample]) -> dict[str, Any]:
    """Figures of one level.

    ttft: sent to first text. tpot: (last - first text) / (tokens - 1), one a request. itl: gaps between texts, over
    all requests. e2e: sent to last text. All in ms. Rates divide by the time from the first send to the last finish.
    """
    good = [sample for sample in samples if sample.ok]
    result: dict[str, Any] = {"requests": len(samples), "failed": len(samples) - len(good)}
    errors = [sample.error for sample in samples if sample.error]
    if errors:
        result["errors"] = sorted(set(errors))[:5]
    if not good:
        return result
    wall = max(s.finished for s in samples) - min(s.sent for s in samples)
    output = sum(s.output_tokens for s in good)
    prompt = sum(s.prompt_tokens for s in good)
    series = {
        "ttft_ms": [s.ttft for s in good],
        "tpot_ms": [s.tpot for s in good if s.tpot is not None],
        "itl_ms": [gap for s in good for gap in s.itl],
        "e2e_ms": [s.e2e for s in good],
    }
    return result | {
        "wall_s": round(wall, 3),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": sum(s.cached_tokens for s in good),
        "requests_per_s": round(len(good) / wall, 3),
        "output_tokens_per_s": round(output / wall, 2),
        "total_tokens_per_s": round((output + prompt) / wall, 2),
        **{name: _figures(values) for name, values in series.items() if values},
    }


def _figures(seconds: Sequence[float]) -> dict[str, float]:
    ms = [value * 1000 for value in seconds]
    figures = {"mean": sum(ms) / len(ms), "min": min(ms), "max": max(ms)}
    figures |= {f"p{percent}": percentile(ms, percent) for percent in PERCENTILES}
    return {name: round(value, 3) for name, value in figures.items()}
