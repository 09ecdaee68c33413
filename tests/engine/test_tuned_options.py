"""Measured launch options on their way into a worker, and files that are of no use there."""

from __future__ import annotations

import logging

import pytest

from headrace.engine.config import env
from headrace.platforms import tuned
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.cpu.runtime import CpuRuntime
from tests.engine.driver import LocalEngine, greedy
from tests.engine.tiny_models import make_tiny

OPTIONS = {"row LinearQuery(in_features=64)": {"BLOCK_N": 2}}


@pytest.fixture
def runtimes(monkeypatch, tmp_path):
    """The runtimes that are opened from here on, with a cache of their own."""
    opened = []

    def open_cpu(self, device):
        opened.append(CpuRuntime(device))
        return opened[-1]

    monkeypatch.setattr(CpuPlatform, "open", open_cpu)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    make_tiny("llama", tmp_path)
    return opened


def test_a_worker_s_runtime_has_them(runtimes, tmp_path):
    name = CpuPlatform.probe()[0].name
    tuned.write(env.tuned_file(name), name, OPTIONS)
    with LocalEngine(tmp_path):
        assert runtimes[0].tuned == OPTIONS


def test_a_broken_file_is_one_warning(runtimes, tmp_path, caplog):
    path = env.tuned_file(CpuPlatform.probe()[0].name)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with caplog.at_level(logging.WARNING), LocalEngine(tmp_path) as engine:
        assert not runtimes[0].tuned
        (answer,) = engine.run([[1, 2, 3]], greedy(3))
    assert len(answer.tokens) == 3
    said = [row.getMessage() for row in caplog.records if str(path) in row.getMessage()]
    assert len(said) == 1 and "bench tune" in said[0]
