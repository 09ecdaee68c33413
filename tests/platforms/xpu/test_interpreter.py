"""The shared kernels with the launch options of Intel's GPUs against the reference, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.platforms.triton.test_interpreter import ROOT, missing


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "group"),
    # dg2 multiplies on its ordinary units, in the smallest tiles
    [(arch, group) for arch in ("bmg", "dg2") for group in ("attention", "experts")],
)
@pytest.mark.timeout(1200)
def test_contracts(arch: str, group: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.platforms.xpu.interpreted", arch, group, "float16"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
