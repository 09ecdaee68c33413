"""Side by side with llama.cpp on this CPU: the same file and load through HTTP, one after the other in every round.

`python benchmarks/cpu/peers.py MODEL.gguf` builds llama-server from the source package of llama-cpp-python (native
flags; needs cmake, a compiler and about ten CPU minutes; kept in --peers), starts both servers, sends each load to one
and then to the other, and prints and writes medians and their ratios. Run it on a quiet machine: it says how busy the
machine was.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

from headrace.cli.api import Address
from headrace.cli.bench.client import completion
from headrace.cli.bench.load import Load, run
from headrace.cli.bench.prompts import prepare
from headrace.cli.bench.record import record, write_json

RESULTS = Path(__file__).parents[1] / "results"
SOURCE = "llama-cpp-python==0.3.36"
LOADS = {
    "1 stream, 128/128": Load(128, 128, requests=3, concurrency=1),
    "prefill 512": Load(512, 1, requests=4, concurrency=1),
    "prefill 2048": Load(2048, 1, requests=2, concurrency=1),
    "8 streams, 128/128": Load(128, 128, requests=16, concurrency=8),
    "16 streams, 128/128": Load(128, 128, requests=32, concurrency=16),
}


def build_llama(folder: Path) -> Path:
    """llama-server, built once."""
    found = list(folder.glob("**/bin/llama-server"))
    if found:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "install", "-q", "scikit-build-core"], check=True)
    options = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "-d", str(folder)]
    subprocess.run([*pip, "download", "-q", *options, SOURCE], check=True)
    archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    tree = next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    flags = ["-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run(["cmake", "-B", "build", *flags], cwd=tree, check=True)
    jobs = str(os.cpu_count())
    build = ["cmake", "--build", "build", "-j", jobs, "--target", "llama-server"]
    subprocess.run(build, cwd=tree, check=True)
    return tree / "build/bin/llama-server"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server process; its figures from start to ready."""

    def __init__(self, name: str, command: list[str], port: int, ready: str) -> None:
        self.name = name
        self.where = Address(f"http://127.0.0.1:{port}")
        began = time.perf_counter()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        while not self._answers(f"http://127.0.0.1:{port}{ready}"):
            if self.process.poll() is not None or time.perf_counter() - began > 300:
                self._log.seek(0)
                sys.exit(f"{name} did not start:\n{self._log.read().decode()[-2000:]}")
            time.sleep(0.02)
        self.ready_s = time.perf_counter() - began
        asyncio.run(self._first())
        self.first_token_s = time.perf_counter() - began
        self.resident = self.memory()

    async def _first(self) -> None:
        body = {"model": "m", "prompt": "Hello", "max_tokens": 1, "stream": True}
        await completion(self.where, body, 60)

    @staticmethod
    def _answers(url: str) -> bool:
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(url, timeout=1).status == 200)
        return False

    def memory(self) -> int:
        main = psutil.Process(self.process.pid)
        return sum(p.memory_full_info().pss for p in (main, *main.children(recursive=True)))

    def load(self, load: Load) -> dict[str, Any]:
        return asyncio.run(run(self.where, "m", load))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def figure(name: str, result: dict[str, Any]) -> float:
    """What a load is judged by; higher is better."""
    if name.startswith("prefill"):
        return result["prompt_tokens"] / result["requests"] / result["ttft_ms"]["p50"] * 1000
    if name.startswith("1 stream"):
        return 1000 / float(result["tpot_ms"]["p50"])
    return float(result["output_tokens_per_s"])


async def short_behind_long(where: Address) -> float:
    """Seconds to the first token of a short request that arrives while a prompt of 2,000 tokens is being read."""
    long = await (await prepare(where, "m", 2000, 0, str(time.time()))).make(0)
    short = await (await prepare(where, "m", 16, 0, str(time.time()))).make(0)

    def body(prompt: Any) -> dict[str, Any]:
        return {"model": "m", "prompt": prompt, "max_tokens": 4, "stream": True}

    behind = asyncio.create_task(completion(where, body(long), 120))
    await asyncio.sleep(0.1)
    sample = await completion(where, body(short), 120)
    await behind
    return float(sample.ttft)


def _spin() -> None:
    while True:
        pass


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Another process that keeps one core busy."""
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    time.sleep(0.5)
    try:
        yield
    finally:
        process.kill()


def compare(servers: list[Server], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Figures by load and server, one a round."""
    figures: dict[str, dict[str, list[float]]] = {}

    def note(load: str, server: Server, value: float) -> None:
        figures.setdefault(load, {}).setdefault(server.name, []).append(value)

    for _ in track(range(rounds), "rounds"):
        for name, load in LOADS.items():
            for server in servers:
                note(name, server, figure(name, server.load(load)))
        for server in servers:
            waited = asyncio.run(short_behind_long(server.where))
            note("short behind long, 1/s", server, 1 / waited)
        with busy_core():
            for server in servers:
                name = "1 stream, 128/128"
                note(f"{name}, a core busy", server, figure(name, server.load(LOADS[name])))
    return figures


def busy_share() -> float:
    """How busy the machine is before we begin, in percent of all cores."""
    return float(psutil.cpu_percent(interval=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--peers", type=Path, default=Path.home() / ".cache/headrace/peers")
    parser.add_argument("--llama-server", type=Path, help="a binary that is already built")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    llama = options.llama_server or build_llama(options.peers)
    threads, busy = str(os.cpu_count()), busy_share()
    ports = [free_port(), free_port()]
    peer = [str(llama), "-m", options.model, "-t", threads, "-tb", threads, "-np", "8", "-cb"]
    peer += ["-c", "32768", "--port", str(ports[1])]
    own = shutil.which("headrace", path=str(Path(sys.executable).parent)) or "headrace"
    served = ["--served-model-name", "m", "--port", str(ports[0])]
    servers = [
        Server("headrace", [own, "serve", options.model, *served], ports[0], "/ready"),
        Server("llama-server", peer, ports[1], "/health"),
    ]
    try:
        figures = compare(servers, options.rounds)
    finally:
        for server in servers:
            server.stop()
    rows = []
    table = Table(title=f"{Path(options.model).name}: medians of {options.rounds} rounds")
    for column in ("load", *(server.name for server in servers), "ratio"):
        table.add_column(column, justify="left" if column == "load" else "right")
    for name, by_server in figures.items():
        first, second = (statistics.median(by_server[server.name]) for server in servers)
        table.add_row(name, f"{first:.1f}", f"{second:.1f}", f"{first / second:.2f}")
        rows.append({"load": name, "ratio": first / second, "rounds": by_server})
    for key in ("ready_s", "first_token_s", "resident"):
        values = [getattr(server, key) for server in servers]
        rows.append({"load": key, **dict(zip((s.name for s in servers), values, strict=True))})
        scale = 1e-9 if key == "resident" else 1.0
        table.add_row(key, *(f"{value * scale:.2f}" for value in values), "")
    Console().print(table, f"machine busy before the start: {busy:.0f} %")
    name = f"cpu-peers-{Path(options.model).stem}.json"
    arguments = {"model": Path(options.model).name, "rounds": options.rounds, "busy_percent": busy}
    write_json(str(options.json or RESULTS / name), record("cpu-peers", arguments, rows))


if __name__ == "__main__":
    main()
