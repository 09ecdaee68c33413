"""Processes that are killed, stopped or told to end at any moment: clear errors, exit codes, no orphans."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.flood import Tally, flood
from tests.e2e.live_server import HEADRACE, LiveServer, live_server

pytestmark = [pytest.mark.model, pytest.mark.slow]

SMALL = ("--max-model-len", "1024", "--max-num-seqs", "64", "--num-gpu-blocks-override", "256")
LONG = {"prompt": "a b c", "max_tokens": 900, "ignore_eos": True, "stream": True}


class Reader:
    """A long stream read in a thread: its lines so far, and its end."""

    def __init__(self, server: LiveServer, wait: bool = True, **fields: Any) -> None:
        self.lines: list[str] = []
        self.broken = ""
        self._server = server
        self._body = {**LONG, **fields}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        deadline = time.monotonic() + 60
        while wait and len(self.lines) < 3:
            assert time.monotonic() < deadline and self._thread.is_alive()
            time.sleep(0.01)

    def _read(self) -> None:
        url = self._server.url + "/v1/completions"
        try:
            with httpx.stream("POST", url, json=self._body, timeout=120) as response:
                self.lines.extend(line for line in response.iter_lines() if line)
        except httpx.TransportError as error:
            self.broken = repr(error)

    def join(self) -> list[str]:
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self.lines


def wait_gone(processes: list[psutil.Process], seconds: float = 20) -> None:
    _, alive = psutil.wait_procs(processes, seconds)
    assert not alive


def test_engine_killed_in_a_flood(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Every client is told, /health says 503 with the reason, the exit code is not 0."""
    args = (*SMALL, "--served-model-name", "flood")
    with live_server(smollm2_gguf, tmp_path, *args) as server:
        family = server.family()
        seen: list[tuple[int, str]] = []

        def kill_and_ask() -> None:
            while server.metric("headrace_generation_tokens_total") < 30:
                time.sleep(0.02)
            server.engine().kill()
            while True:
                try:
                    answer = server.get("/health")
                except httpx.TransportError:
                    return
                seen.append((answer.status_code, answer.text))
                time.sleep(0.02)

        killer = threading.Thread(target=kill_and_ask)
        killer.start()
        tally: Tally = asyncio.run(flood(server.port, 500, seed=11))
        killer.join()
        assert server.wait_ended() == 1
        wait_gone(family)
        statuses = [status for status, _ in seen]
        assert statuses == sorted(statuses) and statuses[-1] == 503, statuses
        assert "signal 9" in seen[-1][1]
        assert tally.errors["engine_failed"] > 0 and set(tally.errors) == {"engine_failed"}, tally
        assert "the engine process was ended by signal 9" in server.log()
        server.check_log()


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """For tests after which it still serves."""
    with live_server(smollm2_gguf, tmp_path_factory.mktemp("serve"), *SMALL) as running:
        yield running
        running.check_log()


def test_engine_that_stands_still_for_a_while(server: LiveServer) -> None:
    """Suspended, swapped out, starved: /health still answers, and afterwards the stream goes on."""
    alone = server.complete(prompt="a b c", max_tokens=200, ignore_eos=True)["choices"][0]["text"]
    reader = Reader(server, max_tokens=200, temperature=0)
    engine = server.engine()
    engine.suspend()
    try:
        time.sleep(0.5)
        before = len(reader.lines)
        waiting = Reader(server, wait=False, max_tokens=1)
        time.sleep(2)
        assert server.get("/health", timeout=1).status_code == 200
        assert len(reader.lines) == before and not waiting.lines
    finally:
        engine.resume()
    lines = reader.join()
    assert lines[-1] == "data: [DONE]" and waiting.join()[-1] == "data: [DONE]"
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == alone
    server.wait_idle()


def test_client_gone_while_the_engine_stands_still(server: LiveServer) -> None:
    engine = server.engine()
    engine.suspend()
    try:
        with pytest.raises(httpx.ReadTimeout):
            server.post("/v1/completions", timeout=1, **LONG)
    finally:
        engine.resume()
    server.wait_idle()
    server.complete()


def test_sigterm_to_every_process_still_drains(smollm2_gguf: Path, tmp_path: Path) -> None:
    """What a service manager does: only the API process may decide what is finished first."""
    args = (*SMALL, "--worker", "process", "--shutdown-timeout", "60")
    with live_server(smollm2_gguf, tmp_path, *args) as server:
        family = server.family()
        assert len(family) > 1  # the engine and its worker
        reader = Reader(server, max_tokens=300)
        for process in (*family, server.process):
            process.send_signal(signal.SIGTERM)
        lines = reader.join()
        assert lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2]
        assert server.wait_ended() == 0
        wait_gone(family)
        server.check_log()


def test_no_orphans_of_a_killed_server(smollm2_gguf: Path, tmp_path: Path) -> None:
    with live_server(smollm2_gguf, tmp_path, *SMALL, "--worker", "process") as server:
        family = server.family()
        reader = Reader(server)
        server.process.kill()
        wait_gone(family)
        assert reader.join()[-1] != "data: [DONE]" and reader.broken
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("victim", [0, 2])
def test_tensor_parallel_worker_killed(smollm2_gguf: Path, tmp_path: Path, victim: int) -> None:
    """The other workers and the engine end, too; the stream ends with an error event, the exit code is 1."""
    args = (*SMALL, "--tensor-parallel-size", "3", "--threads", "1")
    with live_server(smollm2_gguf, tmp_path, *args) as server:
        server.complete()
        family = server.family()
        (engine,) = psutil.Process(server.process.pid).children()
        workers = engine.children()
        assert len(workers) == 3
        reader = Reader(server)
        workers[victim].kill()
        last = json.loads(reader.join()[-1].removeprefix("data: "))
        assert last["error"]["code"] == "engine_failed"
        assert "signal 9" in last["error"]["message"] or "SIGKILL" in last["error"]["message"], last
        assert server.wait_ended() == 1
        wait_gone(family)


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_while_starting(
    smollm2_gguf: Path, tmp_path: Path, seconds: float, number: signal.Signals
) -> None:
    """Whatever it is doing: it ends soon, without a traceback, and takes everything with it."""
    log = tmp_path / "log.txt"
    command = [*HEADRACE, "serve", str(smollm2_gguf), "--port", "0", *SMALL]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=tmp_path)
    while not psutil.Process(
        process.pid
    ).children():  # the engine process, or first what probes the devices
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(seconds)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    try:
        code = process.wait(20)
    finally:
        process.kill()
    wait_gone(family)
    assert code == 0 or (code == 130 and number == signal.SIGINT), log.read_text()
    assert "Traceback" not in log.read_text()
