"""Attention in Triton's interpreter, beyond the contract's cases: plans of captured steps (what a replay reads lies in
buffers that later steps fill), and prompts in every way of dividing them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.platforms.triton.test_interpreter import ROOT, missing


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.parametrize("module", ["captured", "prompts"])
def test_attention(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.platforms.triton.{module}"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
