"""Fixtures of the HTTP cases."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.scripted import Live, make_live


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """A server whose engine says "Hello" to everything; shared, so leave it as it was."""
    live = make_live()
    yield live
    live.close()


CONTEXT = 512
BLOCKS = 32  # of 32 tokens: two full contexts, so that four long requests do not fit at once


@dataclass(frozen=True)
class ModelServer:
    """`headrace serve` with SmolLM2 in float32, reached through the official client."""

    client: openai.OpenAI
    http: httpx.Client
    model: str
    context: int = CONTEXT


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """One server for the whole session; its KV cache is small on purpose."""
    folder = tmp_path_factory.mktemp("serve")
    path = str(folder / "api.sock")
    log = folder / "log.txt"
    command = [sys.executable, "-m", "headrace.cli.main", "serve", str(smollm2_gguf)]
    command += ["--uds", path, "--dtype", "float32", "--max-model-len", str(CONTEXT)]
    command += ["--block-size", "32", "--num-gpu-blocks-override", str(BLOCKS)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder)
    try:
        http = httpx.Client(
            base_url="http://server",
            transport=httpx.HTTPTransport(uds=path),
            timeout=120,
        )
        deadline = time.monotonic() + 240
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            with contextlib.suppress(httpx.TransportError):
                if http.get("/ready").status_code == 200:
                    break
            time.sleep(0.1)
        client = openai.OpenAI(
            base_url="http://server/v1", api_key="none", http_client=http, max_retries=0
        )
        yield ModelServer(client, http, client.models.list().data[0].id)
        process.terminate()
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
