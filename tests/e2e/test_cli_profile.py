"""`headrace bench profile` as it is typed, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.model
def test_tables_figures_and_traces(smollm2_gguf: Path, tmp_path: Path) -> None:
    trace, figures = tmp_path / "t.json", tmp_path / "f.json"
    command = [sys.executable, "-m", "headrace.cli.main", "bench", "profile", str(smollm2_gguf)]
    options = ["--requests=1,2", "--context=32", "--max-model-len=512", "--device=cpu"]
    options += [f"--chrome-trace={trace}", f"--json={figures}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "2 requests of 32 tokens that decode" in done.stdout and "limit" in done.stdout
    results = json.loads(figures.read_text())["results"]
    assert [row["requests"] for row in results] == [1, 2]
    for row in results:
        assert row["limit_s"] > 0 and row["step_s"] > 0
        assert {"linear", "the rest"} <= {op["op"] for op in row["ops"]}
        assert row["host"]["inputs"] > 0
        assert row["processes"] is None or row["processes"]["engine"] > 0
    for number in (1, 2):
        events = json.loads((tmp_path / f"t-{number}.json").read_text())["traceEvents"]
        assert {"step", "op"} <= {event.get("cat") for event in events}
        assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
