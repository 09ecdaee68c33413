"""These tests need the real torch_npu with libraries in place of CANN's: `python tests/platforms/npu/prove.py`."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _proved() -> None:
    # torch_npu may be installed where CANN is not: its import would then fail in the middle
    if os.environ.get("HEADRACE_PROVE_NPU") != "1":
        pytest.skip("run by python tests/platforms/npu/prove.py")
