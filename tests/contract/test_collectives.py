"""Collectives: groups of processes over gloo, the choice that their ranks make together, and the group of one.

What a start tests is shown to find each fault of group_rank.py, and to leave a group that is right.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.platforms.collectives import OP, GroupSpec, SoloCollectives
from headrace.platforms.groups import open_group
from headrace.platforms.queries import GroupQuery
from headrace.platforms.registry import REFERENCE, Policy, Registry, select

ROOT = Path(__file__).parents[2]


# the faults of each scene, and what the line in the log names
FAULTS = {
    "off": r"off is left out (self-test failed (rank 1: CheckFailed: the sum of 257 torch.",
    "unsummed": r"unsummed is left out (self-test failed (CheckFailed: the sum of 1 torch.",
    "stale": r"stale is left out (self-test failed (CheckFailed: the sum of ",
    "swapped": r"swapped is left out (self-test failed (CheckFailed: 1 torch.",
    "from_zero": r"from_zero is left out (self-test failed (CheckFailed: ids of rank 1: ",
    "absent": r"absent is left out (load failed: rank 1: RuntimeError: no such device)",
}
SCENES = (*FAULTS, "torch", "absent,off,torch", "off,alone", "uneven", "capturing")


def ranks(folder: Path, *scenes: str, world: int = 2) -> list[tuple[int, dict[str, Any], str]]:
    """(exit code, what it says of each scene, its standard error) of each rank."""
    return processes("group_rank", world, str(world), str(folder), *scenes)


def processes(module: str, world: int, *words: str) -> list[tuple[int, dict[str, Any], str]]:
    started = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.contract.{module}", str(rank), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(world)
    ]
    found = []
    for process in started:
        out, log = process.communicate(timeout=120)
        found.append((process.returncode, json.loads(out) if out else {}, log))
    return found


def agreed(folder: Path, *scenes: str, world: int = 2) -> dict[str, dict[str, Any]]:
    """What the first rank says of each scene, which is what all of them say."""
    found = ranks(folder, *scenes, world=world)
    for code, _, log in found:
        assert code == 0, log
    first, *others = [said for _, said, _ in found]
    for other, scene in itertools.product(others, scenes):
        for about in ("chosen", "capture"):
            assert other[scene].get(about) == first[scene].get(about), scene
        assert not other[scene]["log"], "one rank says it for all"
    return first


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return agreed(tmp_path_factory.mktemp("groups"), *SCENES)


def test_the_preferred_one_serves(scenes):
    said = scenes["torch"]
    status, *reasons = said["table"]["torch"]
    assert (said["chosen"], status, said["log"]) == ("torch", "unverified", [])
    assert reasons[1].startswith("self-test passed (known sums of 2 ranks")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_one_is_left_out(scenes, fault):
    said = scenes[fault]
    assert said["chosen"] == REFERENCE and said["table"][fault][0] == "no"
    (line,) = said["log"]
    assert line.startswith(f"collectives: {FAULTS[fault]}"), line
    assert line.endswith("; reference serves")


def test_several_wrong_ones_are_left_out_in_turn(scenes):
    said = scenes["absent,off,torch"]
    assert said["chosen"] == "torch" and len(said["log"]) == 2


def test_nothing_right_is_an_error(scenes):
    error = scenes["off,alone"]["error"]
    assert error.startswith("collectives: no implementation can serve on cpu:")
    assert "off: self-test failed" in error and "reference: disabled by" in error


def test_what_one_rank_cannot_serve_no_rank_takes(scenes):
    """Devices of two generations in one machine: each rank alone would choose otherwise, and wait for ever."""
    said = scenes["uneven"]
    assert said["chosen"] == REFERENCE
    assert said["table"]["uneven"] == ["no", "rank 1: an older device"]


def test_a_call_that_graphs_lose_is_not_captured(scenes):
    said = scenes["capturing"]
    assert said["chosen"] == "capturing" and not said["capture"]
    assert "but not inside a graph: a sum in a graph" in said["table"]["capturing"][-1]


def test_one_that_hangs_ends_the_process_with_the_way_out(tmp_path):
    for code, _, log in ranks(tmp_path, "hangs"):
        assert code == 1
        assert "hangs did not answer within 3 s" in log
        assert "start again with --disable collectives=hangs" in log


def test_vendors_ways_to_add_up(tmp_path):
    """Over what stands in for their libraries: used for small sums, and not at all when one is wrong."""
    for code, said, log in processes("vendor_rank", 2, str(tmp_path)):
        assert code == 0, log
        cuda = said.pop("cuda")
        assert cuda["chosen"] == "symmetric_memory" and cuda["calls"]["one_shot"] > 10
        assert len(said) == 4
        for name, found in said.items():
            (place,) = found["calls"]
            assert place.endswith(":CustomAllreduce") and found["calls"][place] > 10
            assert found["chosen"] == ("rccl" if "wrong" in name else "aiter")
            if "wrong" in name:
                assert (
                    "self-test failed (rank 0: CheckFailed: the sum of"
                    in found["table"]["aiter"][0]
                )


def test_a_group_of_one(runtime, registry):
    with open_group(GroupSpec(0, 1, ""), runtime, registry) as group:
        assert isinstance(group, SoloCollectives) and group.capture_safe
        x = torch.arange(4.0)
        for result in (group.all_reduce(x), group.all_gather(x), group.broadcast(x)):
            assert torch.equal(result, torch.arange(4.0))
        group.barrier()


@pytest.mark.parametrize(
    ("spec", "world", "chosen"),
    [
        ("cuda:sm_90", 2, "symmetric_memory"),
        ("cuda:sm_90", 16, "nccl"),
        ("cuda:sm_75", 2, "nccl"),
        ("rocm:gfx942", 8, "aiter"),
        ("rocm:gfx942", 3, "rccl"),
        ("rocm:gfx1100", 2, "rccl"),
        ("xpu:bmg", 2, "xccl"),
        ("npu:910B", 8, "hccl"),
        ("cpu:avx2", 2, REFERENCE),
    ],
)
def test_what_each_platform_takes(spec, world, chosen):
    from headrace.platforms.probe import load_platform

    name, _, arch = spec.partition(":")
    platform = load_platform(name)
    registry = Registry.with_reference(platform.implementations())
    device, query = platform.describe(arch), GroupQuery(world)
    decision = select(OP, query, device, registry, versions=lambda _: "9999")
    assert decision.chosen == chosen
    own = [row for row in decision.candidates if row.name != REFERENCE]
    assert all(row.status != "yes" and row.reasons for row in own)
    wide = select(OP, GroupQuery(world, False), device, registry, Policy(), versions=lambda _: "9")
    assert wide.chosen not in ("aiter", "symmetric_memory")
