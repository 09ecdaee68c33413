"""The XPU platform without a device: made-up machines, a made-up Level Zero, verdicts, defaults, problems."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.platforms.platform import ModelShape
from headrace.platforms.queries import AttentionQuery, NormQuery, SampleQuery
from headrace.platforms.registry import Policy, Registry, SelectionError, select
from headrace.platforms.xpu import hardware, level_zero
from headrace.platforms.xpu.level_zero import Found, LevelZero, LevelZeroError
from headrace.platforms.xpu.platform import XpuPlatform

GIB = 1 << 30
SHAPE = ModelShape("llama", 32, 4096, 32, 8, 128, 128256, 8_030_000_000, "bfloat16", 131072)
TRITON = {"triton-xpu": "3.7.2"}


def machine(root: Path, *gpus: tuple[int, int, str], file: str = "usable") -> Path:
    """A tree with the render nodes of GPUs (vendor, device id, driver)."""
    for index, (vendor, device, driver) in enumerate(gpus):
        name = f"renderD{128 + index}"
        pci = root / f"sys/devices/pci0000:00/0000:0{index + 3}:00.0"
        pci.mkdir(parents=True)
        (pci / "vendor").write_text(f"{vendor:#06x}\n")
        (pci / "device").write_text(f"{device:#06x}\n")
        if driver:
            (root / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
            (pci / "driver").symlink_to(root / "sys/bus/pci/drivers" / driver)
        entry = root / "sys/class/drm" / name
        entry.mkdir(parents=True)
        (entry / "device").symlink_to(pci)
        if file:
            (root / "dev/dri").mkdir(parents=True, exist_ok=True)
            (root / "dev/dri" / name).touch()
    return root


IDS = {
    0xE20B: "bmg",
    0x0BD5: "pvc",
    0x56A0: "dg2",
    0x64A0: "lnl",
    0xB080: "ptl",
    0x7D51: "arl",
    0x7D55: "mtl",
    0x7D67: "mtl",
    0x9A49: "other",
    0x1234: "other",
}


@pytest.mark.parametrize(("device", "arch"), IDS.items())
def test_device_ids(tmp_path, device, arch):
    assert hardware.family_of(device) == arch
    (node,) = hardware.nodes(machine(tmp_path, (0x8086, device, "xe")))
    assert node == hardware.Node("/dev/dri/renderD128", "xe", device, "0000:03:00.0", True, True)


def test_no_id_belongs_to_two_families():
    ids = [number for family in hardware.FAMILIES.values() for number in family.ids]
    assert len(ids) == len(set(ids))


def test_a_usable_gpu_among_others(tmp_path):
    gpus = ((0x10DE, 0x2330, "nvidia"), (0x8086, 0xE20B, "xe"), (0x8086, 0xA780, "i915"))
    root = machine(tmp_path, *gpus)
    assert hardware.device_files(root) is None
    assert [node.address for node in hardware.nodes(root)] == ["0000:04:00.0", "0000:05:00.0"]


@pytest.mark.parametrize(
    ("gpus", "file", "why"),
    [
        ((), "usable", "no Intel GPU here"),
        (((0x10DE, 0x2330, "nvidia"),), "usable", "no Intel GPU here"),
        (((0x8086, 0xE20B, "vfio-pci"),), "usable", "driven by vfio-pci, not by i915 or xe"),
        (((0x8086, 0xE20B, ""),), "usable", "driven by nothing"),
        (((0x8086, 0xE20B, "xe"),), "", "--device /dev/dri"),
    ],
)
def test_why_there_is_none(tmp_path, gpus, file, why):
    reason = hardware.device_files(machine(tmp_path, *gpus, file=file))
    assert reason is not None and why in reason


def test_a_file_that_may_not_be_opened_names_the_group(tmp_path, monkeypatch):
    root = machine(tmp_path, (0x8086, 0x0BD5, "i915"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    reason = hardware.device_files(root)
    assert reason is not None and "render" in reason and "0bd5 (pvc)" in reason


def test_windows_in_linux_is_left_to_the_library(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    assert hardware.device_files(tmp_path) is None


def test_host_memory(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal: 32000 kB\nMemFree: 1 kB\nMemAvailable: 8000 kB\n"
    )
    assert hardware.host_memory(tmp_path) == (8000 * 1024, 32000 * 1024)
    assert hardware.host_memory(tmp_path / "nowhere") == (0, 0)


class FakeLoader:
    """Level Zero's C interface over a list of devices, as far as probing calls it."""

    def __init__(self, devices, init=0):
        self.devices, self.code = devices, init

    def zeInit(self, _flags):
        return self.code

    def _list(self, count, handles, values):
        if handles is None:
            count._obj.value = len(values)
        else:
            for index in range(count._obj.value):
                handles[index] = values[index]
        return 0

    def zeDriverGet(self, count, handles):
        return self._list(count, handles, [0x10])

    def zeDeviceGet(self, driver, count, handles):
        assert driver.value == 0x10
        return self._list(count, handles, [0x100 + index for index in range(len(self.devices))])

    def zeDriverGetProperties(self, _driver, facts):
        assert facts._obj.stype == 0x1
        facts._obj.version = 1 << 24 | 6 << 16 | 33578
        return 0

    def zeDeviceGetProperties(self, handle, facts):
        assert facts._obj.stype == 0x3
        device = self.devices[handle.value - 0x100]
        for name, value in device.items():
            if name != "memory":
                setattr(facts._obj, name, value)
        return 0

    def zeDeviceGetMemoryProperties(self, handle, count, memories):
        if memories is None:
            count._obj.value = 1
        else:
            assert memories[0].stype == 0x7
            memories[0].total = self.devices[handle.value - 0x100]["memory"]
        return 0


ARC = {"type": 1, "vendor": 0x8086, "device": 0xE20B, "flags": 0, "slices": 5, "subslices": 4}
ARC |= {"name": b"Intel(R) Arc(TM) B580 Graphics", "memory": 12 * GIB}
IRIS = {**ARC, "device": 0x64A0, "flags": 1, "slices": 1, "subslices": 8, "memory": 30 * GIB}
NPU = {**ARC, "type": 5}


def loader(monkeypatch, *devices, init=0):
    monkeypatch.setattr(level_zero, "_load", lambda _names: FakeLoader(devices, init))


def test_level_zero(monkeypatch):
    loader(monkeypatch, ARC, ARC, NPU)
    found, version = LevelZero().devices()
    assert found == [Found("Intel(R) Arc(TM) B580 Graphics", 0xE20B, 12 * GIB, 20, False)] * 2
    assert version == "1.6.33578"


def test_integrated_gpus_count_only_alone(monkeypatch):
    """As torch numbers them: with a discrete GPU, an integrated one is not seen."""
    loader(monkeypatch, IRIS, ARC)
    assert [device.integrated for device in LevelZero().devices()[0]] == [False]
    loader(monkeypatch, IRIS)
    assert [device.integrated for device in LevelZero().devices()[0]] == [True]


def test_without_a_driver_or_a_loader(monkeypatch):
    loader(monkeypatch, init=0x78000001)
    with pytest.raises(LevelZeroError, match=r"no driver for Level Zero.*libze-intel-gpu1"):
        LevelZero()
    monkeypatch.undo()
    with pytest.raises(LevelZeroError, match="cannot be loaded"):
        LevelZero(["libze_no_such_loader.so"])


def test_structures_have_the_sizes_of_the_header():
    """sizeof and offsetof of ze_api.h's structures on a 64-bit machine."""
    assert ctypes.sizeof(level_zero._Driver) == 40 and level_zero._Driver.version.offset == 32
    assert ctypes.sizeof(level_zero._Device) == 368 and level_zero._Device.name.offset == 112
    assert ctypes.sizeof(level_zero._Memory) == 296 and level_zero._Memory.total.offset == 32


VERSIONS = {"torch": "2.12.0+xpu", "triton-xpu": "3.7.1"}


def probe(monkeypatch, *devices, versions=VERSIONS, built="20250302", host=(4 * GIB, 16 * GIB)):
    loader(monkeypatch, *devices)
    monkeypatch.setattr(hardware, "torch_xpu", lambda: built)
    named = lambda *names: next((versions[name] for name in names if name in versions), "")  # noqa: E731
    monkeypatch.setattr(hardware, "version_of", named)
    monkeypatch.setattr(hardware, "host_memory", lambda: host)
    monkeypatch.delenv("ONEAPI_DEVICE_SELECTOR", raising=False)
    return XpuPlatform.probe()


def test_probe(monkeypatch):
    (device,) = probe(monkeypatch, ARC)
    assert device.spec == "xpu:0" and device.arch == "bmg" and device.units == 20
    assert device.memory == 12 * GIB and "block_2d" in device.features and not device.notes
    assert device.versions["triton"] == "3.7.1" and device.versions["driver"] == "1.6.33578"
    (shared,) = probe(monkeypatch, IRIS)
    assert shared.arch == "lnl" and shared.memory == 16 * GIB  # not more than the machine has


def test_probe_says_what_is_missing(monkeypatch):
    with pytest.raises(RuntimeError, match="has no XPU; install the XPU build"):
        probe(monkeypatch, ARC, built="")
    with pytest.raises(RuntimeError, match="shows no Intel GPU"):
        probe(monkeypatch)
    monkeypatch.setenv("ZE_AFFINITY_MASK", "7")
    with pytest.raises(RuntimeError, match="ZE_AFFINITY_MASK='7' hides"):
        probe(monkeypatch)
    (old,) = probe(monkeypatch, ARC, versions={"torch": "2.9.1+xpu"})
    assert "no graphs: torch 2.9.1+xpu is older than 2.11" in old.notes[0]
    monkeypatch.setattr(hardware, "version_of", lambda *_: "2.12.0")
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", "opencl:gpu")
    assert "ZE_AFFINITY_MASK" in XpuPlatform.probe()[0].notes[0]


def test_another_vendors_triton_does_not_count(monkeypatch):
    for found, version in (("3.6.0", ""), ("3.8.0+xpu", "3.8.0+xpu")):
        monkeypatch.setattr(hardware, "version_of", lambda *n, v=found: v if "triton" in n else "")
        assert hardware.triton_version() == version


def choose(op, query, device, versions=TRITON, **policy):
    registry = Registry.with_reference(XpuPlatform().implementations())
    return select(op, query, device, registry, Policy(**policy), versions=versions.get)


def attention(dtype="bfloat16", size=128, **options):
    return AttentionQuery(32, 8, size, size, dtype, options.pop("kv", dtype), 0.1, **options)


@pytest.mark.parametrize("arch", XpuPlatform.known_archs())
def test_described_families(arch):
    device = XpuPlatform.describe(arch)
    assert device.arch == arch and device.memory and device.units
    decision = choose("paged_attention", attention(device.dtypes[0]), device)
    row = next(row for row in decision.candidates if row.name == "triton")
    assert decision.chosen == "triton" and row.status == "unverified" and arch in row.reasons[0]


def test_nothing_of_a_device_is_verified():
    device = XpuPlatform.describe("bmg")
    for row in XpuPlatform().implementations():
        if row.name != "host":
            query = SampleQuery(1000, 4) if row.op == "sample" else None
            if query is not None:
                assert row.supports(query, device).status == "unverified"
    with pytest.raises(ValueError, match="bmg"):
        XpuPlatform.describe("xe9")


def test_an_unknown_gpu_is_served_by_the_reference_and_said(monkeypatch):
    (old,) = probe(monkeypatch, {**ARC, "device": 0x9A49})
    assert choose("rms_norm", NormQuery(64, "float16"), old).chosen == "reference"
    problems = XpuPlatform().check(config(), old)
    assert any(p.level == "error" and "--device cpu" in p.text for p in problems)


def test_without_float64_the_host_draws():
    query = SampleQuery(1000, 4)
    assert choose("sample", query, XpuPlatform.describe("dg2")).chosen == "host"
    decision = choose("sample", query, XpuPlatform.describe("bmg"))
    assert decision.chosen == "triton"
    with pytest.raises(SelectionError, match="can draw tokens itself"):
        choose("sample", query, XpuPlatform.describe("bmg"), force={"sample": "host"})


def test_host_sampling_is_the_reference():
    import torch

    from headrace.platforms.reference.sampling import sample
    from headrace.platforms.xpu.sampling import HostSample

    draw = torch.Generator().manual_seed(1)
    logits, number = torch.randn(4, 99, generator=draw), torch.rand(4, generator=draw)
    inputs = (logits, number + 0.1, torch.full((4,), 7, dtype=torch.int32), number, number, number)
    runtime = SimpleNamespace(device=torch.device("cpu"))
    assert torch.equal(HostSample(SampleQuery(99, 4), runtime)(*inputs), sample(*inputs))


def test_defaults_have_reasons_and_follow_the_device():
    large, small, shared = (
        XpuPlatform().defaults(SHAPE, XpuPlatform.describe(arch)) for arch in ("pvc", "dg2", "lnl")
    )
    assert large["model.dtype"].value == "bfloat16" and small["model.dtype"].value == "float16"
    tokens = "scheduler.max_num_batched_tokens"
    assert large[tokens].value > small[tokens].value > shared[tokens].value
    assert "cache.memory_utilization" in shared and "cache.memory_utilization" not in large
    assert large["cache.block_size"].value == 64
    assert all(default.reason for d in (large, small, shared) for default in d.values())


def config(dtype="auto", world=1, worker="auto"):
    device = SimpleNamespace(tensor_parallel_size=world, worker=worker)
    return SimpleNamespace(model=SimpleNamespace(dtype=dtype), device=device)


def test_problems_have_a_way_out():
    platform, arc = XpuPlatform(), XpuPlatform.describe("bmg")
    assert not platform.check(config(), arc)
    (problem,) = platform.check(config("float64"), arc)
    assert problem.level == "error" and "bfloat16" in problem.text
    (problem,) = platform.check(config(world=2, worker="inproc"), arc)
    assert "--worker process" in problem.text
    bare = dataclasses.replace(arc, versions={"torch": "2.12.0+xpu"})
    (problem,) = platform.check(config(), bare)
    assert problem.level == "warning" and "triton-xpu" in problem.text
    (problem,) = platform.check(config(), XpuPlatform.describe("dg2"))
    assert "float64" in problem.text


def test_workers_see_the_devices_that_were_probed():
    env = XpuPlatform().worker_env(XpuPlatform.describe("pvc"), 1, 2)
    assert "ZE_AFFINITY_MASK" not in env and env["CCL_LOCAL_RANK"] == "1"
    assert "CCL_LOCAL_SIZE" not in XpuPlatform().worker_env(XpuPlatform.describe("pvc"), 0, 1)
