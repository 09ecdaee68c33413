"""Case 101 with real signals and exit codes, on a server process of its own behind a Unix socket."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.http_helpers import USER, events

SCRIPT = Path(__file__).with_name("serve_scripted.py")
STREAM = {"messages": USER, "stream": True}


@contextmanager
def process(
    folder: Path, *arguments: str
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    path = str(folder / "api.sock")
    server = subprocess.Popen([sys.executable, str(SCRIPT), path, *arguments])
    transport = httpx.HTTPTransport(uds=path)
    try:
        with httpx.Client(base_url="http://server", transport=transport, timeout=20) as http:
            deadline = time.monotonic() + 30
            while True:
                try:
                    assert http.get("/health").status_code == 200
                    break
                except httpx.TransportError:
                    assert time.monotonic() < deadline and server.poll() is None
                    time.sleep(0.05)
            yield server, http
    finally:
        server.kill()
        server.wait()


def test_case_101_sigterm_drains(tmp_path: Path) -> None:
    with process(tmp_path, "30") as (server, http):
        with http.stream("POST", "/v1/chat/completions", json=STREAM) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            while True:
                answer = http.post("/v1/chat/completions", json=STREAM)
                if answer.status_code == 503:
                    break
            assert answer.json()["error"]["code"] == "draining"
            rest = list(lines)
        assert rest.count("data: [DONE]") == 1
        assert sum('"content":"x"' in line for line in rest) >= 39
        assert server.wait(10) == 0
    assert not (tmp_path / "api.sock").exists()


@pytest.mark.parametrize(("drain", "signals"), [("0", 1), ("60", 2)])
def test_case_101_no_time_to_drain(tmp_path: Path, drain: str, signals: int) -> None:
    with (
        process(tmp_path, drain) as (server, http),
        http.stream("POST", "/v1/chat/completions", json=STREAM) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        for _ in range(signals):
            server.send_signal(signal.SIGTERM)
            time.sleep(0.1)  # two signals at the same time are one
        last = events("\n".join([line for line in lines if line][-1:]) + "\n\n")[0]
        assert last["error"]["code"] == "shutting_down"
        assert server.wait(10) == 0


def test_idle_server_ends_at_once(tmp_path: Path) -> None:
    with process(tmp_path, "60") as (server, _):
        server.send_signal(signal.SIGINT)
        assert server.wait(10) == 0


def test_the_engines_end_is_a_failure(tmp_path: Path) -> None:
    with process(tmp_path, "60", "die") as (server, _):
        assert server.wait(20) == 1
