"""A CUDA device, opened once; tests that need one are skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.platforms.cuda.platform import CudaPlatform
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.registry import Registry


@pytest.fixture(scope="session")
def runtime() -> Iterator[DeviceRuntime]:
    reason = CudaPlatform.plausible()
    if reason:
        pytest.skip(reason)
    platform = CudaPlatform()
    opened = platform.open(platform.probe()[0])
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def make(runtime: DeviceRuntime) -> Callable[[str, str, Any], Any]:
    """make(op, implementation, query): bound as the engine binds it."""
    registry = Registry.with_reference(CudaPlatform().implementations())

    def make(op: str, name: str, query: Any) -> Any:
        row = next(row for row in registry.candidates(op) if row.name == name)
        assert row.supports(query, runtime.info).status != "no"
        target = row.load()
        made = CONTRACTS[op].kind == "class" or row.per_query
        return target(query, runtime) if made else target

    return make
