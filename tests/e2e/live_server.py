"""`headrace serve` as its user starts it: real processes, a real port, its log in a file, its engine process by id."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

HEADRACE = (sys.executable, "-m", "headrace.cli.main")
# Nothing goes wrong in these tests that would excuse one of them.
NEVER_LOGGED = ("Traceback", "lost track", "was never awaited", "never retrieved", "fatal")


@dataclass(frozen=True)
class LiveServer:
    """A server that is ready."""

    process: subprocess.Popen[bytes]
    port: int
    log_file: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def check_log(self) -> None:
        log = self.log()
        assert not [words for words in NEVER_LOGGED if words in log], log

    def engine(self) -> psutil.Process:
        """The engine process."""
        (engine,) = psutil.Process(self.process.pid).children()
        return engine

    def family(self) -> list[psutil.Process]:
        """Every process below the server."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def get(self, path: str, timeout: float = 10) -> httpx.Response:
        return httpx.get(self.url + path, timeout=timeout)

    def post(self, path: str, timeout: float = 60, **fields: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=fields, timeout=timeout)

    def complete(self, **fields: Any) -> dict[str, Any]:
        """A small greedy completion that must be answered."""
        fields = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, **fields}
        answer = self.post("/v1/completions", **fields)
        assert answer.status_code == 200, answer.text
        return json.loads(answer.content)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        total, seen = 0.0, False
        for line in self.get("/metrics").text.splitlines():
            if re.match(name + r"[{ ]", line) and all(
                f'{k}="{v}"' in line for k, v in labels.items()
            ):
                total, seen = total + float(line.rpartition(" ")[2]), True
        assert seen, name
        return total

    def wait_idle(self, seconds: float = 10) -> None:
        """Nothing runs, nothing waits, no block is held. The gauges come every 0.1 s."""
        names = ("headrace_requests_running", "headrace_requests_waiting")
        gauges = (*names, "headrace_kv_cache_usage_ratio")
        deadline = time.monotonic() + seconds
        while any(values := [self.metric(name) for name in gauges]):
            assert time.monotonic() < deadline, dict(zip(gauges, values, strict=True))
            time.sleep(0.05)

    def wait_ended(self, seconds: float = 30) -> int:
        return self.process.wait(seconds)


@contextmanager
def live_server(model: Path | str, folder: Path, *args: str) -> Iterator[LiveServer]:
    """Serve on a free port until the block ends; then nothing of it may be left."""
    log_file = folder / "log.txt"
    command = [*HEADRACE, "serve", str(model), "--port", "0", *args]
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    family: list[psutil.Process] = []
    try:
        yield LiveServer(process, _port_when_ready(process, log_file), log_file)
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(family, 15)
        for left in alive:
            left.kill()
    assert not alive, "processes outlived the server"


def _port_when_ready(process: subprocess.Popen[bytes], log_file: Path) -> int:
    deadline = time.monotonic() + 120
    while True:
        text = log_file.read_text(errors="replace")
        found = re.search(r"^URL: http://127\.0\.0\.1:(\d+)/v1$", text, re.MULTILINE)
        if found and "\ntry: " in text:
            return int(found[1])
        assert process.poll() is None and time.monotonic() < deadline, text
        time.sleep(0.1)
