"""The sampling kernels with rows of many tiles and lists that overflow, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.platforms.triton.test_interpreter import ROOT, missing


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.timeout(600)
def test_tiles_lists_and_edges_give_what_the_reference_gives() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.platforms.triton.interpreted_sampling"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
