"""The ROCm platform without a device: sysfs as machines show it, described architectures, defaults, problems."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.platforms import probe
from headrace.platforms.platform import ModelShape
from headrace.platforms.queries import AttentionQuery, LinearQuery, NormQuery
from headrace.platforms.registry import Policy, Registry, Requirement, SelectionError, select, unmet
from headrace.platforms.rocm import hardware
from headrace.platforms.rocm.platform import RocmPlatform

SHAPE = ModelShape("llama", 32, 4096, 32, 8, 128, 128256, 8_030_000_000, "bfloat16", 131072)
# what the kernel lists of an MI300X and of an RX 7900 XTX beside a processor
MI300 = {"simd_count": 1216, "simd_per_cu": 4, "wave_front_size": 64, "gfx_target_version": 90402}
NAVI31 = {"simd_count": 192, "simd_per_cu": 2, "wave_front_size": 32, "gfx_target_version": 110000}
GIB = 1 << 30


class Machine:
    """The files of the kernel driver under a folder."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes, self.render = root / "nodes", root / "drm"
        self.nodes.mkdir()
        monkeypatch.setattr(hardware, "NODES", self.nodes)
        monkeypatch.setattr(hardware, "RENDER", self.render)
        self.node({"cpu_cores_count": 96, "simd_count": 0, "gfx_target_version": 0})

    def node(self, facts: dict[str, int], memory: int = 0, heap: int = 1, **files: str) -> Path:
        """The next node, with a bank of memory; `files`: of its render device."""
        index = len(list(self.nodes.iterdir()))
        node = self.nodes / str(index)
        facts = {"drm_render_minor": 127 + index, "unique_id": 0xABC0 + index, **facts}
        _write(node / "properties", facts)
        (node / "name").write_text("ip discovery\n")
        _write(node / "mem_banks/0/properties", {"heap_type": heap, "size_in_bytes": memory})
        device = self.render / f"renderD{127 + index}" / "device"
        device.mkdir(parents=True)
        for name, text in files.items():
            (device / name).write_text(text + "\n")
        return node


def _write(path: Path, facts: dict[str, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{name} {value}\n" for name, value in facts.items()))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def test_devices_of_the_topology(machine):
    machine.node(MI300, 192 * GIB, product_name="AMD Instinct MI300X OAM")
    machine.node(NAVI31, 24 * GIB)
    first, second = hardware.devices({})
    assert first == hardware.Found(
        "AMD Instinct MI300X OAM", "gfx942", 192 * GIB, 304, 64, "GPU-000000000000abc1"
    )
    assert (second.name, second.arch, second.units, second.wave) == (
        "AMD gfx1100",
        "gfx1100",
        96,
        32,
    )


def test_nodes_are_in_the_order_of_their_numbers(machine):
    for memory in range(1, 13):
        machine.node(NAVI31, memory * GIB)
    assert [found.memory // GIB for found in hardware.devices({})] == list(range(1, 13))


def test_memory_of_an_integrated_device(machine):
    """Its banks are the machine's; the driver says what share of it is the device's."""
    machine.node(NAVI31, 64 * GIB, heap=0, mem_info_vram_total=str(16 * GIB))
    machine.node(NAVI31, 64 * GIB, heap=0)
    assert [found.memory for found in hardware.devices({})] == [16 * GIB, 0]


@pytest.mark.parametrize(
    ("environment", "left"),
    [
        ({}, [1, 2, 3]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [3, 1]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "0,7,1"}, [1]),  # ends at what means nothing
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"HIP_VISIBLE_DEVICES": "0,0,1"}, [1, 2]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [2]),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "2"}, [3]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000ABC3,0"}, [3, 1]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, [3]),
    ],
)
def test_visible_devices(machine, environment, left):
    for memory in (1, 2, 3):
        machine.node(MI300, memory * GIB)
    assert [found.memory // GIB for found in hardware.devices(environment)] == left


def test_a_device_that_a_container_was_not_given_is_passed_over(machine, monkeypatch):
    hidden = machine.node(MI300, GIB)
    machine.node(NAVI31, 2 * GIB)
    read = Path.read_text

    def guarded(path: Path, *arguments: object, **named: object) -> str:
        if path == hidden / "properties":
            raise PermissionError(1, "Operation not permitted")
        return read(path, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", guarded)
    assert [found.arch for found in hardware.devices({})] == ["gfx1100"]


def test_no_topology_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "NODES", tmp_path / "none")
    with pytest.raises(hardware.TopologyError, match="is the amdgpu module loaded"):
        hardware.devices({})


def test_why_there_is_no_device(monkeypatch, tmp_path):
    kfd = tmp_path / "kfd"
    monkeypatch.setattr(hardware, "KFD", kfd)
    assert "/dev/kfd" in str(RocmPlatform.plausible())
    kfd.touch()
    assert RocmPlatform.plausible() is None
    monkeypatch.setattr(hardware.os, "access", lambda *_: False)
    assert "render and video" in str(RocmPlatform.plausible())


def test_probe(machine, monkeypatch):
    machine.node(MI300, 192 * GIB)
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HSA_OVERRIDE_GFX_VERSION", raising=False)
    monkeypatch.setattr(hardware, "torch_hip", lambda: "")
    with pytest.raises(RuntimeError, match="has no HIP; install the ROCm build"):
        RocmPlatform.probe()
    monkeypatch.setattr(hardware, "torch_hip", lambda: "6.4.43484")
    (device,) = RocmPlatform.probe()
    assert device.spec == "rocm:0" and device.versions["torch HIP"] == "6.4.43484"
    assert not device.notes
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "11.0.0")
    (device,) = RocmPlatform.probe()
    assert device.arch == "gfx1100" and "pass for gfx1100" in device.notes[0]
    assert device == probe._device(dataclasses.asdict(device))  # it survives the way to a parent


def test_the_device_that_is_meant_comes_first(machine, monkeypatch):
    """Indices are HIP's; a device that is not served is passed over, a small integrated one comes last."""
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HSA_OVERRIDE_GFX_VERSION", raising=False)
    monkeypatch.setattr(hardware, "torch_hip", lambda: "6.4")
    old = {**MI300, "gfx_target_version": 90012}
    machine.node(old, GIB)
    with pytest.raises(RuntimeError, match="gfx90c: none of the generations"):
        RocmPlatform.probe()
    machine.node({**NAVI31, "gfx_target_version": 100306}, GIB // 2)
    machine.node(NAVI31, 24 * GIB)
    machine.node(NAVI31, 20 * GIB)
    assert [device.spec for device in RocmPlatform.probe()] == ["rocm:2", "rocm:3", "rocm:1"]


@pytest.mark.parametrize(
    ("version", "arch"),
    [
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (110000, "gfx1100"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
    ],
)
def test_names_of_architectures(version, arch):
    assert hardware.arch_of(version) == arch and hardware.family(arch)


@pytest.mark.parametrize("arch", RocmPlatform.known_archs())
def test_described_architectures(arch):
    device = RocmPlatform.describe(arch)
    assert device.arch == arch and device.memory and device.units
    assert ("wave64" in device.features) == arch.startswith("gfx9") != ("wave32" in device.features)
    assert ("mfma" in device.features) != ("wmma" in device.features)
    assert ("fp8_fnuz" in device.features) == (arch == "gfx942")
    assert ("fp8" in device.features) == (arch in ("gfx942", "gfx950", "gfx1201"))
    assert device.dtypes[0] == "bfloat16"


def test_an_unknown_architecture_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="gfx942"):
        RocmPlatform.describe("gfx1")


def choose(op, query, device, versions, **policy):
    registry = Registry.with_reference(RocmPlatform().implementations())
    return select(op, query, device, registry, Policy(**policy), versions=versions.get)


def attention(dtype="bfloat16", size=128, **options):
    return AttentionQuery(32, 8, size, size, dtype, options.pop("kv", dtype), 0.1, **options)


def test_triton_goes_by_several_names():
    device = RocmPlatform.describe("gfx90a")
    for name in hardware.TRITON_NAMES:
        assert (
            choose("rms_norm", NormQuery(64, "bfloat16"), device, {name: "3.6.0"}).chosen
            == "triton"
        )
    decision = choose("rms_norm", NormQuery(64, "bfloat16"), device, {})
    assert decision.chosen == "reference"
    row = next(row for row in decision.candidates if row.name == "triton")
    assert row.reasons == ("triton>=3.2 is not installed",)
    need = Requirement("triton", ">=3.2", ("triton-rocm",))
    assert (
        unmet(need, {"triton-rocm": "3.1.0"}.get)
        == "triton-rocm 3.1.0 is installed, >=3.2 is needed"
    )


def test_nothing_is_verified():
    """No such device was ever at hand: whatever serves natively is tested against the reference at start."""
    versions = {"triton": "3.6.0", "amd-aiter": "0.1.7"}
    for arch in RocmPlatform.known_archs():
        device = RocmPlatform.describe(arch)
        for row in RocmPlatform().implementations():
            query = NormQuery(64, "bfloat16") if "norm" in row.op else None
            if query is not None:
                assert row.supports(query, device).status in ("unverified", "no")
        with pytest.raises(SelectionError, match="only verified"):
            choose("rms_norm", NormQuery(64, "bfloat16"), device, versions,
                   only_verified=True, force={"rms_norm": "triton"})  # fmt: skip


def test_an_architecture_without_kernels_is_refused():
    device = dataclasses.replace(RocmPlatform.describe("gfx90a"), arch="gfx803")
    with pytest.raises(SelectionError, match="do not serve gfx803"):
        choose(
            "linear",
            LinearQuery(64, 64, "float32"),
            device,
            {"triton": "3.6.0"},
            force={"linear": "triton"},
        )
    (problem,) = RocmPlatform().check(config(), device)
    assert problem.level == "error" and "--device cpu" in problem.text


def config(dtype="auto", world=1, worker="auto"):
    device = SimpleNamespace(tensor_parallel_size=world, worker=worker)
    return SimpleNamespace(model=SimpleNamespace(dtype=dtype), device=device)


def test_check(monkeypatch):
    platform, device = RocmPlatform(), RocmPlatform.describe("gfx942")
    assert not platform.check(config(), device)
    (problem,) = platform.check(config("float64"), device)
    assert "take one of: bfloat16" in problem.text
    (problem,) = platform.check(config(world=2, worker="inproc"), device)
    assert "--worker process" in problem.text
    monkeypatch.setattr(hardware, "version_of", lambda *_: "")
    here = dataclasses.replace(device, versions={"torch": "2.13.0"})
    assert [found.level for found in platform.check(config(), here)] == ["warning"]


def test_defaults_have_reasons_and_follow_the_device():
    small, large = (
        RocmPlatform().defaults(SHAPE, RocmPlatform.describe(a)) for a in ("gfx1201", "gfx942")
    )
    tokens = "scheduler.max_num_batched_tokens"
    assert small[tokens].value < large[tokens].value
    assert all(default.reason for default in (*small.values(), *large.values()))
    old = dataclasses.replace(
        RocmPlatform.describe("gfx1100"),
        features=hardware.features_of("gfx1030"),
        dtypes=hardware.dtypes_of("gfx1030"),
    )
    default = RocmPlatform().defaults(SHAPE, old)["model.dtype"]
    assert default.value == "float16" and "no matrix units" in default.reason


def test_worker_env_leaves_the_devices_visible():
    platform = RocmPlatform()
    for arch in platform.known_archs():
        for world in (1, 2):
            found = platform.worker_env(platform.describe(arch), 0, world)
            assert not any("VISIBLE" in name for name in found)
            server = arch in ("gfx942", "gfx950")
            assert ("HSA_NO_SCRATCH_RECLAIM" in found) == (server and world > 1)
