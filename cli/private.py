"""A server for one command: `headrace serve` in a process of its own on a Unix socket, gone when the command ends.

The commands that talk to a model (chat, complete, bench) have one way to do it, HTTP, whether the server was there
already or is this one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from headrace.cli.api import Address
from headrace.cli.errors import RUNTIME, CliError
from headrace.engine.config.flag import Given

STOP_SECONDS = 10.0
POLL_SECONDS = 0.02


@contextlib.contextmanager
def server(
    model: str, given: Sequence[Given] = (), config: str = "", quiet: bool = True
) -> Iterator[Address]:
    """Serve `model` while the block runs. Its progress bar and errors go to this command's standard error."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-"))
    socket = folder / "api.sock"
    process = subprocess.Popen(
        serve_command(model, given, config, ("--uds", str(socket)), quiet),
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if not quiet else subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this command, not for the server
        preexec_fn=_die_with_parent,
    )
    try:
        where = Address("http://localhost", str(socket))
        wait_ready(where, process)
        yield where
    finally:
        stop(process)
        shutil.rmtree(folder, ignore_errors=True)


def serve_command(
    model: str, given: Sequence[Given], config: str, extra: Sequence[str], quiet: bool
) -> list[str]:
    """The command line that serves `model` with these settings."""
    command = [sys.executable, "-m", "headrace.cli.main", "serve", model]
    for row in given:
        values = row.value if isinstance(row.value, list | tuple) else [row.value]
        for value in values:
            if isinstance(value, bool):
                name = row.flag.name.removeprefix("--")
                command.append(f"--{name}" if value else f"--no-{name}")
            else:
                command.append(f"{row.flag.name}={value}")
    if config:
        command.append(f"--config={config}")
    if quiet and not any(row.flag.name == "--log-level" for row in given):
        command.append("--log-level=warning")
    return [*command, *extra]


def wait_ready(where: Address, process: subprocess.Popen[bytes], timeout: float = 3600.0) -> None:
    """Until /ready answers 200. A server that fails first has printed why: its exit code becomes ours."""
    deadline = time.monotonic() + timeout
    with client(where) as http:
        while time.monotonic() < deadline:
            code = process.poll()
            if code is not None and code > 0:
                raise SystemExit(code)
            if code is not None:
                how = f"was ended by signal {-code}" if code else "ended at once"
                raise CliError(f"the server {how}; headrace serve shows more", RUNTIME)
            with contextlib.suppress(httpx.TransportError):
                if http.get("/ready").status_code == 200:
                    return
            time.sleep(POLL_SECONDS)
    raise CliError(f"the server was not ready within {timeout:.0f} s", RUNTIME)


def client(where: Address) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=where.uds) if where.uds else None
    return httpx.Client(
        base_url=where.url,
        headers=where.headers(),
        transport=transport,
        trust_env=False,
        timeout=5.0,
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL to what is left after `STOP_SECONDS`."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _die_with_parent() -> None:
    """On Linux the kernel ends the server when this command is killed; elsewhere SIGKILL would leave it running."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
