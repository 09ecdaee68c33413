"""Finding devices: names, plugins that do not fit, priorities, and an import that stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.platforms import probe
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.device import DeviceInfo
from headrace.platforms.probe import PlatformError, describe_device, resolve_device


class Accelerator(CpuPlatform):
    """Two devices and a preference above the CPU's."""

    name = "accel"
    priority = 50

    @classmethod
    def probe(cls):
        return [DeviceInfo("accel", n, f"device {n}", "a1") for n in range(2)]


class Absent(CpuPlatform):
    name = "absent"
    priority = 90

    @classmethod
    def plausible(cls):
        return "no such card"


class Old(CpuPlatform):
    name = "old"
    api_version = 0


class Entry:
    def __init__(self, name: str, target: object) -> None:
        self.name, self._target = name, target

    def load(self) -> object:
        if isinstance(self._target, Exception):
            raise self._target
        return self._target


@pytest.fixture
def installed(monkeypatch):
    """Install platforms: installed(name=class or exception); the CPU is always there."""

    def install(**platforms: object) -> None:
        entries = [
            Entry(name, target) for name, target in {"cpu": CpuPlatform, **platforms}.items()
        ]
        monkeypatch.setattr(probe.metadata, "entry_points", lambda group: entries)

    return install


def test_the_preferred_platform_is_taken_and_the_others_are_explained(installed):
    installed(accel=Accelerator, absent=Absent, old=Old, broken=ImportError("libx.so"))
    found = resolve_device()
    assert (found.device.spec, len(found.devices)) == ("accel:0", 2)
    others = dict(line.split(": ", 1) for line in found.others)
    assert others["absent"] == "no such card"
    assert others["cpu"] == "not preferred over accel"
    assert "platform API 0" in others["old"] and "libx.so" in others["broken"]
    assert others["accel:1"] == "not the first device"


def test_a_device_by_its_name(installed):
    installed(accel=Accelerator)
    assert resolve_device("accel:1").device.index == 1
    assert resolve_device("cpu").device.platform == "cpu"
    assert "accel:0: not asked for" in resolve_device("accel:1").others


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            "cuda",
            "no platform named 'cuda' in this installation; installed: absent, accel, cpu, old",
        ),
        ("", "no platform named ''"),
        ("accel:7", "no device accel:7; there are: accel:0, accel:1"),
        ("accel:x", "no device accel:x"),
        ("absent", "'absent' cannot be used: no such card"),
        ("old", "built for platform API 0, this is 1"),
    ],
)
def test_what_cannot_be_resolved_is_one_sentence(installed, spec, text):
    installed(accel=Accelerator, absent=Absent, old=Old)
    with pytest.raises(PlatformError, match=text) as caught:
        resolve_device(spec)
    assert "\n" not in str(caught.value)


def test_only_some_platforms_are_looked_at(installed):
    installed(accel=Accelerator, broken=ImportError("must not be imported"))
    found = resolve_device("auto", only=("cpu",))
    assert found.device.platform == "cpu" and not found.others
    with pytest.raises(PlatformError, match="installed: cpu"):
        resolve_device("accel", only=("cpu",))


def test_described_devices(installed):
    installed(accel=Accelerator)
    assert describe_device("cpu:avx2").device.arch == "avx2"
    assert describe_device("cpu").device == describe_device("cpu:0").device
    assert "paged_attention" in describe_device("cpu:neon").registry().ops()
    with pytest.raises(PlatformError, match="no CPU arch named 'avx9'; known: portable"):
        describe_device("cpu:avx9")
    with pytest.raises(PlatformError, match="no platform named 'rocm'"):
        describe_device("rocm:gfx942")


def test_a_device_survives_the_way_from_the_probing_process():
    (device,) = probe._probe_apart("cpu", 60.0)
    assert device == CpuPlatform.probe()[0]


LIGHT = """
import sys
from headrace.platforms.probe import resolve_device, describe_device
from headrace.platforms.registry import select
from headrace.platforms.queries import NormQuery
import headrace.platforms.ops, headrace.platforms.attention, headrace.platforms.linear
found = resolve_device("cpu")
select("rms_norm", NormQuery(64, "float32"), found.device, found.registry())
describe_device("cpu:amx")
found.platform.worker_env(found.device, 0, 1)
print(sorted(set(sys.modules) & {"torch", "numpy", "transformers"}))
"""


def test_selection_and_contracts_never_import_torch():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
