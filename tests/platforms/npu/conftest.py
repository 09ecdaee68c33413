"""The platform on the CPU: its ops' kernels (kernels.py) and a stand-in for torch.npu (simulated.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.platforms.npu.platform import NpuPlatform
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.registry import Registry
from tests.platforms.npu.simulated import SimulatedNpu, SimulatedRuntime, simulate


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> SimulatedNpu:
    return simulate(monkeypatch)


@pytest.fixture
def runtime(npu: SimulatedNpu) -> SimulatedRuntime:
    import torch

    from tests.platforms.npu import kernels

    torch.set_num_threads(1)  # small products: more threads only wait for each other
    kernels.register()
    return SimulatedRuntime(NpuPlatform.describe("910B"))


@pytest.fixture
def make(runtime: SimulatedRuntime) -> Callable[[str, str, Any], Any]:
    """make(op, implementation, query): bound as the engine binds it."""
    registry = Registry.with_reference(NpuPlatform().implementations())

    def make(op: str, name: str, query: Any) -> Any:
        row = next(row for row in registry.candidates(op) if row.name == name)
        target = row.load()
        made = CONTRACTS[op].kind == "class" or row.per_query
        return target(query, runtime) if made else target

    return make
