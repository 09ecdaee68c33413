"""Every way to sum over the devices of a machine that has several: a rank on each, over that one alone."""

from __future__ import annotations

import pytest

from headrace.cli.conformance.ranks import run_group
from headrace.platforms.collectives import OP
from headrace.platforms.cuda.platform import CudaPlatform
from headrace.platforms.registry import Registry

pytestmark = pytest.mark.device
REGISTRY = Registry.with_reference(CudaPlatform().implementations())


@pytest.mark.parametrize("name", [row.name for row in REGISTRY.candidates(OP)])
def test_a_rank_on_each_device(name: str) -> None:
    devices = [] if CudaPlatform.plausible() else CudaPlatform.probe()
    if len(devices) < 2:
        pytest.skip("it takes two devices")
    assert run_group(devices, name) == ""
