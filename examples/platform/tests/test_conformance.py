"""The platform's test is the conformance run: every implementation against the reference, and whole models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_conformance(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "headrace.cli.main", "conformance", "--device", "example"]
    done = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["complete"] and found["failed"] == 0
    own = [row for row in found["implementations"] if row["implementation"] == "example"]
    ops = {"linear", "rms_norm", "fused_add_rms_norm", "collectives", "model"}
    assert {row["op"] for row in own} == ops
    assert all(row["passed"] > 0 and row["verdict"] in ("yes", "") for row in own), own
