"""The device under test: the one that is here, opened once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.ops import Ops
from headrace.platforms.reference.checks.base import Make
from headrace.platforms.registry import Policy, Registry


@pytest.fixture(scope="session")
def runtime() -> Iterator[DeviceRuntime]:
    threads = torch.get_num_threads()
    platform = CpuPlatform()
    opened = platform.open(platform.probe()[0])
    # one thread: threads that wait for each other on a busy machine take minutes for what takes seconds
    torch.set_num_threads(1)
    yield opened
    opened.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def registry() -> Registry:
    return Registry.with_reference(CpuPlatform().implementations())


@pytest.fixture
def bind(runtime: DeviceRuntime, registry: Registry):
    """bind(op, query, implementation): exactly that one, or SelectionError."""

    def bind(op: str, query: object, name: str) -> object:
        return Ops(registry, runtime.info, runtime, Policy(force={op: name})).bind(op, query)

    return bind


@pytest.fixture
def maker(bind, runtime: DeviceRuntime):
    """maker(op, implementation): what the checks of platforms/reference/checks are given."""
    return lambda op, name: Make(lambda query: bind(op, query, name), runtime)
