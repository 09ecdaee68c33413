"""The shared kernels with AMD's launch options against the reference, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.platforms.triton.test_interpreter import ROOT, missing


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "group", "dtype"),
    [
        *(
            (arch, group, dtype)
            for arch in ("gfx942", "gfx1100")
            for group, dtype in (
                ("rows", "float16"),
                ("attention", "float32"),
                ("attention", "float16"),
                ("experts", "float16"),
            )
        ),
        ("gfx942", "aiter", "float16"),
    ],
)
@pytest.mark.timeout(1200)
def test_contracts(arch: str, group: str, dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.platforms.rocm.interpreted", arch, group, dtype],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
