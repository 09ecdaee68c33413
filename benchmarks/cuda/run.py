"""Serve models with made-up weights on a CUDA device and put the loads of the comparison on them, over HTTP.

    python -m benchmarks.cuda.run --models llama-3.1-8b --json results/cuda.json

Random prompts of exact lengths, end of text ignored, temperature 0, 8,192 tokens of context: how the other servers were
measured on the same machine (docs). The server's start is timed from its command to the first ready answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cuda.models import write
from headrace.cli.api import Address
from headrace.cli.bench.load import Load
from headrace.cli.bench.load import run as run_load
from headrace.cli.bench.record import record, write_json
from headrace.cli.private import serve_command, stop, wait_ready

# concurrency, prompt tokens, output tokens, requests
LOADS = ((1, 512, 128, 8), (32, 1024, 128, 96), (128, 1024, 256, 384), (256, 128, 256, 768))


@contextlib.contextmanager
def served(model: Path, extra: list[str], log: Path) -> Iterator[tuple[Address, float]]:
    """A server on a free port, and the seconds it took to be ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--load-format=dummy", "--max-model-len=8192", f"--port={port}", *extra]
    began = time.monotonic()
    with log.open("wb") as output:
        command = serve_command(str(model), (), "", options, quiet=False)
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            where = Address(f"http://127.0.0.1:{port}")
            wait_ready(where, process, timeout=300)
            yield where, time.monotonic() - began
        finally:
            stop(process)


def settle(where: Address, seconds: float = 60.0) -> None:
    """Wait until all graphs are captured: an idle server does that after it is ready, and steady state is measured."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < seconds:
        page = httpx.get(f"{where.url}/metrics").text
        found = dict(re.findall(r"^headrace_graphs_(\w+)\{.*\} (\S+)$", page, re.MULTILINE))
        captured, planned = (float(found.get(key, 0)) for key in ("captured", "planned"))
        # what is planned is told with the first graph; without graphs nothing ever comes
        if captured == planned and (planned or waited > 5):
            return
        time.sleep(0.2)


def measure(
    name: str, folder: Path, extra: list[str], log: Path, only: set[int]
) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    with served(write(name, folder), extra, log) as (where, ready):
        results.append({"model": name, "level": "start", "ready_s": round(ready, 2)})
        print(results[-1], flush=True)
        served_name = httpx.get(f"{where.url}/v1/models").json()["data"][0]["id"]
        settle(where)
        for concurrency, prompt, output, requests in LOADS:
            if only and concurrency not in only:
                continue
            load = Load(
                prompt_tokens=prompt,
                output_tokens=output,
                requests=requests,
                concurrency=concurrency,
                warmup=2,
                seed=f"{time.time_ns()}",
            )
            figures = asyncio.run(run_load(where, served_name, load))
            level = f"{concurrency}: {prompt}/{output}"
            results.append({"model": name, "level": level, **figures})
            print(json.dumps(results[-1]), flush=True)
    return results


def device() -> dict[str, str]:
    """What nvidia-smi says of the device."""
    fields = "name,driver_version,clocks.sm,clocks.mem"
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return {}
    return dict(zip(fields.split(","), said.split(", "), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-3.1-8b", help="names, separated by commas")
    parser.add_argument("--json", default="", help="write the figures to this file")
    parser.add_argument("--log", default="", help="folder for the servers' output")
    parser.add_argument("--commit", default="", help="where the checkout has no git to ask")
    parser.add_argument("--concurrency", default="", help="only these loads, e.g. 1,256")
    parser.add_argument("extra", nargs="*", help="more options of `headrace serve`, after --")
    asked = parser.parse_args()
    only = {int(part) for part in asked.concurrency.split(",") if part}
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(asked.log or scratch)
        for name in asked.models.split(","):
            results += measure(name, Path(scratch), asked.extra, logs / f"{name}.log", only)
    arguments = {"models": asked.models, "serve": asked.extra}
    report = record("benchmarks.cuda.run", arguments, results)
    report["machine"]["device"] = device()
    report["commit"] = asked.commit or report["commit"]
    if asked.json:
        write_json(asked.json, report)


if __name__ == "__main__":
    main()
