"""500 concurrent streams with random sizes, stop strings, aborts and disconnects: nothing leaks, nothing is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.flood import flood
from tests.e2e.live_server import live_server

pytestmark = [pytest.mark.model, pytest.mark.slow]

ROOM = 64 + 1024  # --max-num-seqs and --max-queued-requests
SETTINGS = ("--max-model-len", "1024", "--max-num-seqs", "64", "--max-queued-requests", "1024")


def test_500_streams_with_every_way_to_leave(smollm2_gguf: Path, tmp_path: Path) -> None:
    # The cache is small enough for preemptions under this load.
    args = (*SETTINGS, "--block-size", "32", "--num-gpu-blocks-override", "96")
    args += ("--served-model-name", "flood")
    with live_server(smollm2_gguf, tmp_path, *args) as server:
        before = server.complete(max_tokens=8)
        tally = asyncio.run(flood(server.port, 500, seed=7))
        server.wait_idle()
        assert not tally.errors and not tally.cut, tally
        readers = tally.ways["read"] + tally.ways["slow"] + tally.ways["sdk reads"]
        assert sum(tally.ways.values()) == 500 and readers > 250, tally
        assert set(tally.reasons) == {"stop", "length"} and tally.reasons.total() >= readers, tally
        assert server.metric("headrace_requests_finished_total", finish_reason="error") == 0
        assert server.metric("headrace_requests_finished_total", finish_reason="abort") > 0
        after = server.complete(max_tokens=8)
        assert after["choices"] == before["choices"]
        # Every place in the queue was given back: as many sequences as there are places are let in at once.
        everyone = server.complete(prompt=[[1]] * ROOM, max_tokens=1)
        assert len(everyone["choices"]) == ROOM
        assert server.post("/v1/completions", prompt=[[1]] * (ROOM + 1)).status_code == 429
        server.wait_idle()
        assert server.get("/health").status_code == 200
        server.check_log()
        server.process.terminate()
        assert server.wait_ended() == 0
        server.check_log()
