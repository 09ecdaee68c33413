"""What is chosen on devices that need not be here, and why: compared with reviewed tables."""

from __future__ import annotations

import pytest

from tests.selection.table import (
    GOLDEN,
    cpu_scenes,
    cuda_scenes,
    fake_scenes,
    npu_scenes,
    rocm_scenes,
    text,
    xpu_scenes,
)

pytest_plugins = ["tests.fake_platform.plugin"]

HOW = "selection changed; if that is meant: python -m tests.selection.table, and review the diff"


@pytest.mark.parametrize(
    "scene",
    [*cpu_scenes(), *cuda_scenes(), *npu_scenes(), *rocm_scenes(), *xpu_scenes()],
    ids=lambda scene: scene.name,
)
def test_described(scene):
    assert text(scene) == (GOLDEN / f"{scene.name}.json").read_text(), HOW


def test_fake(fake_platform):
    for scene in fake_scenes():
        assert text(scene) == (GOLDEN / f"{scene.name}.json").read_text(), f"{scene.name}: {HOW}"


def test_no_table_is_left_over(fake_platform):
    scenes = {
        scene.name
        for scenes in (cpu_scenes, cuda_scenes, npu_scenes, rocm_scenes, xpu_scenes, fake_scenes)
        for scene in scenes()
    }
    assert {path.stem for path in GOLDEN.glob("*.json")} == scenes
