"""Triton's kernels against the reference, without a device: in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[3]


def missing() -> str:
    """Why the interpreter cannot be used here; "" when it can."""
    try:
        triton, numpy = metadata.version("triton"), Version(metadata.version("numpy"))
    except metadata.PackageNotFoundError:
        return "triton is not installed"
    if Version(triton) < Version("3.7") and numpy >= Version("2.4"):
        return f"the interpreter of triton {triton} does not work with numpy {numpy}"
    return ""


# bfloat16 is left to devices: the interpreter multiplies the bits of it.
@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.parametrize(
    ("group", "dtype"),
    [
        ("rows", "float32"),
        ("rows", "float16"),
        ("few rows", "float32"),
        ("experts", "float32"),
        ("logits", "float32"),
        ("sorted experts", "float32"),
        ("tiled experts", "float32"),
        pytest.param("experts", "float16", marks=pytest.mark.slow),
        pytest.param("tiled experts", "float16", marks=pytest.mark.slow),
        pytest.param("sample", "float32", marks=pytest.mark.slow),
        pytest.param("attention", "float32", marks=pytest.mark.slow),
        pytest.param("attention", "float16", marks=pytest.mark.slow),
        pytest.param("latent", "float32", marks=pytest.mark.slow),
        pytest.param("latent", "float16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(1200)
def test_contracts(group: str, dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.platforms.triton.interpreted", group, dtype],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
