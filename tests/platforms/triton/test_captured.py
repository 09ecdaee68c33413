"""Plans of captured steps in Triton's interpreter: what a replay reads lies in buffers that later steps fill."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.platforms.triton.test_interpreter import ROOT, missing


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
def test_a_captured_plan_serves_other_steps() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.platforms.triton.captured"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
