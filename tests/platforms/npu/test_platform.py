"""The NPU platform without a device and without torch_npu: detection, versions, described generations, verdicts."""

from __future__ import annotations

import dataclasses
import subprocess
from types import SimpleNamespace

import pytest

from headrace.platforms.npu import hardware, versions
from headrace.platforms.npu.platform import NpuPlatform
from headrace.platforms.npu.rows import VERIFIED
from headrace.platforms.platform import ModelShape
from headrace.platforms.queries import (
    ActivationQuery,
    AttentionQuery,
    ExpertsQuery,
    LinearQuery,
    RotaryQuery,
    SampleQuery,
)
from headrace.platforms.registry import Policy, Registry, SelectionError, select
from tests.platforms.npu.samples import A2, A3, DUO, Machine

SHAPE = ModelShape("llama", 32, 4096, 32, 8, 128, 128256, 8_030_000_000, "bfloat16", 131072)
INSTALLED = {"torch": "2.12.0+cpu", "torch-npu": "2.12.0"}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that puts a machine in place of this one."""

    def make(table, installed=INSTALLED, cann="9.1.0", sourced=True):
        made = Machine(tmp_path, table)
        monkeypatch.setattr(hardware, "DEVICES", tmp_path / "dev")
        monkeypatch.setattr(hardware, "ASCEND", tmp_path / "Ascend")
        monkeypatch.setattr(hardware, "smi", made.smi)
        monkeypatch.setattr(hardware, "version_of", lambda name: installed.get(name, ""))
        monkeypatch.delenv(hardware.VISIBLE, raising=False)
        monkeypatch.delenv(hardware.HOME, raising=False)
        if cann:
            home = made.cann(cann)
            if sourced:
                monkeypatch.setenv(hardware.HOME, str(home))
        return made

    return make


def config(dtype="auto", world=1, worker="auto"):
    device = SimpleNamespace(tensor_parallel_size=world, worker=worker)
    return SimpleNamespace(model=SimpleNamespace(dtype=dtype), device=device)


# -- detection --------------------------------------------------------------------------------------------------------


def test_generations_are_told_apart(machine):
    machine(A2)
    first, second = NpuPlatform.probe()
    assert (first.name, first.arch, first.memory) == ("Ascend910B3", "910B", 65536 << 20)
    assert first.dtypes[0] == "bfloat16" and "fused_attention" in first.features
    assert not first.notes and "Warning" in second.notes[0]
    assert first.versions == {**INSTALLED, "CANN": "9.1.0", "driver": "25.5.0"}


def test_a_910c_is_known_by_its_board(machine):
    made = machine(A3)
    devices = NpuPlatform.probe()
    assert [(device.index, device.name, device.arch) for device in devices] == [
        (0, "Ascend910_9391", "910C"),
        (1, "Ascend910_9391", "910C"),
    ]
    assert ("info", "-t", "board", "-i", "0", "-c", "1") in made.asked


def test_both_chips_of_a_310p_card(machine):
    machine(DUO)
    devices = NpuPlatform.probe()
    assert [device.arch for device in devices] == ["310P", "310P"]
    assert [device.memory >> 20 for device in devices] == [44278, 43693]
    assert devices[0].dtypes == ("float16", "float32") and devices[0].features == frozenset()


@pytest.mark.parametrize(
    ("soc", "arch"),
    [
        ("Ascend310P3", "310P"),
        ("Ascend310P3vir04", "310P"),
        ("Ascend910B4-1", "910B"),
        ("Ascend910B2C", "910B"),
        ("Ascend910_9392", "910C"),
        ("Ascend910A", ""),
        ("Ascend910B", ""),  # the first 910's variant B, not the generation
        ("Ascend910ProB", ""),
        ("Ascend310B4", ""),
        ("Ascend950PR", ""),
    ],
)
def test_soc_names(soc, arch):
    assert hardware.arch_of(soc) == arch


def test_an_unknown_generation_is_refused_with_the_known_ones(machine):
    machine(A2.replace("910B3 ", "910A  "))
    device = NpuPlatform.probe()[0]
    assert device.arch == "Ascend910A"
    (problem,) = NpuPlatform().check(config(), device)
    assert problem.level == "error" and "310P, 910B, 910C" in problem.text
    row = next(row for row in NpuPlatform().implementations() if row.op == "silu_and_mul")
    assert row.supports(ActivationQuery(64, "float16"), device).status == "no"


@pytest.mark.parametrize(
    ("asked", "seen"), [("", [0, 1]), ("1", [1]), ("1,0", [1, 0]), ("1,7,0", [1]), ("0,0", [0])]
)
def test_visible_devices_are_numbered_as_cann_does(machine, monkeypatch, asked, seen):
    machine(DUO)
    monkeypatch.setenv(hardware.VISIBLE, asked)
    sizes = [44278, 43693]
    devices = NpuPlatform.probe()
    assert [device.memory >> 20 for device in devices] == [sizes[place] for place in seen]
    assert [device.index for device in devices] == list(range(len(seen)))


def test_no_device_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "DEVICES", tmp_path)
    assert "no Ascend device" in (NpuPlatform.plausible() or "")
    (tmp_path / "davinci_manager").touch()
    assert "pass one to the container" in (NpuPlatform.plausible() or "")
    (tmp_path / "davinci3").touch()
    assert NpuPlatform.plausible() is None


def test_npu_smi_that_is_missing_hangs_or_fails(monkeypatch):
    def missing(*_args, **_options):
        raise FileNotFoundError("npu-smi")

    def hangs(*_args, **_options):
        raise subprocess.TimeoutExpired("npu-smi", 1)

    def fails(*_args, **_options):
        return SimpleNamespace(returncode=8, stdout="", stderr="dcmi module initialize failed.\n")

    for run, why in ((missing, "mount"), (hangs, "did not answer"), (fails, "dcmi module")):
        monkeypatch.setattr(hardware.subprocess, "run", run)
        with pytest.raises(hardware.SmiError, match=why):
            NpuPlatform.probe()


def test_without_torch_npu_the_command_is_said(machine):
    machine(A2, {"torch": "2.12.0+cpu"})
    with pytest.raises(RuntimeError, match=r"pip install 'torch-npu==2\.12\.0\.\*'"):
        NpuPlatform.probe()


# -- versions ---------------------------------------------------------------------------------------------------------


def test_what_fits_together_is_not_spoken_of(machine):
    machine(A2)
    platform, device = NpuPlatform(), NpuPlatform.probe()[0]
    assert not platform.check(config(), device)


def test_cann_must_be_sourced(machine):
    machine(A2, sourced=False)
    (problem,) = NpuPlatform().check(config(), NpuPlatform.probe()[0])
    assert problem.level == "error" and "set_env.sh" in problem.text


@pytest.mark.parametrize(
    ("torch_npu", "cann"),
    [
        ("2.9.0", "8.5.0"),
        ("2.9.0.post1", "8.5.0"),
        ("2.9.0.post7", "9.1.0"),
        ("2.12.0.post3", "9.1.0"),
        ("2.12.0rc1", ""),  # before the first release for this torch
        ("2.13.0", ""),
        ("2.8.0", ""),
    ],
)
def test_the_table_knows_releases_between_its_entries(torch_npu, cann):
    assert versions.cann_needed(torch_npu) == cann


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({"torch": "2.13.0"}, "error", ("torch 2.13.0", "need torch 2.12.0")),
        ({"CANN": ""}, "error", ("have no CANN", "need CANN 9.1.0")),
        ({"CANN": "8.5.0"}, "warning", ("have CANN 8.5.0", "need 9.1.0")),
        ({"driver": "24.1.rc3.7"}, "error", ("have driver 24.1.rc3.7", "need 25.2")),
        ({"driver": "25.0.rc1.1"}, "error", ("have driver 25.0", "need 25.2")),
        ({"torch": "2.13.0", "torch-npu": "2.13.0"}, "warning", ("not in the table", "2.12.0")),
        ({"torch-npu": ""}, "error", ("no torch-npu", "torch-npu==2.12.0.*")),
    ],
)
def test_what_does_not_fit_says_have_and_need(changed, level, words):
    found = {**INSTALLED, "CANN": "9.1.0", "driver": "25.5.0", **changed}
    (problem,) = versions.problems(found)
    assert problem.level == level
    assert all(word in problem.text for word in words)


def test_every_entry_of_the_table_has_a_driver():
    for cann in versions.CANN_OF.values():
        assert ".".join(cann.split(".")[:2]) in versions.DRIVER_OF


# -- described generations --------------------------------------------------------------------------------------------


def choose(op, query, arch, **policy):
    registry = Registry.with_reference(NpuPlatform().implementations())
    device = NpuPlatform.describe(arch)
    here = {"torch-npu": "2.12.0"}.get
    return select(op, query, device, registry, Policy(**policy), versions=here)


def attention(dtype="bfloat16", size=128, heads=32, kv_heads=8, **options):
    kv = options.pop("kv", dtype)
    return AttentionQuery(
        heads, kv_heads, size, options.pop("v_size", size), dtype, kv, 0.1, **options
    )


@pytest.mark.parametrize("arch", NpuPlatform.known_archs())
def test_nothing_is_called_verified_that_never_ran(arch):
    device = NpuPlatform.describe(arch)
    assert device.arch == arch and device.memory and device.units > 1
    assert arch not in VERIFIED
    decision = choose("rms_norm", SimpleNamespace(hidden=64, dtype="float16"), arch)
    row = next(row for row in decision.candidates if row.name == "torch_npu")
    assert decision.chosen == "torch_npu" and row.status == "unverified"


def test_sampling_is_left_to_the_host_where_the_device_cannot():
    query = SampleQuery(1000, 8)
    assert choose("sample", query, "310P").chosen == "host"
    assert choose("sample", query, "910B").chosen == "reference"


def test_an_unknown_architecture_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="910B"):
        NpuPlatform.describe("910")


def test_what_the_ops_cannot_do_is_said():
    for op, name, query, arch, why in (
        ("paged_attention", "fia", attention("float32"), "910B", "dtype float32"),
        ("paged_attention", "fia", attention("float16"), "310P", "does not run on 310P"),
        ("paged_attention", "fia", attention(size=512), "910B", "heads of 512"),
        ("paged_attention", "fia", attention(size=72), "910B", "no multiple of 16"),
        ("paged_attention", "fia", attention(v_size=64), "910B", "beside values of 64"),
        ("paged_attention", "fia", attention(heads=128, kv_heads=1), "910B", "exceed 64"),
        ("paged_attention", "fia", attention(softcap=30.0), "910C", "soft cap"),
        ("paged_attention", "fia", attention(sinks=True), "910C", "sinks"),
        ("paged_attention", "fia", attention(kv="fp8_e4m3"), "910B", "KV in fp8_e4m3"),
        ("linear", "nz", LinearQuery(4096, 1, "bfloat16"), "910B", "1 output features"),
        ("linear", "nz", LinearQuery(64, 64, "bfloat16", "Q4_K"), "910B", "dequantized at load"),
        ("linear", "nz", LinearQuery(64, 64, "bfloat16"), "310P", "does not compute in bfloat16"),
        (
            "rotary_embedding",
            "apply_rotary",
            RotaryQuery(80, 80, "bfloat16"),
            "910B",
            "heads of 80",
        ),
        (
            "fused_experts",
            "torch_npu",
            ExpertsQuery(8, 2, 64, 64, "bfloat16", activation="gelu"),
            "910B",
            "gated gelu",
        ),
        (
            "fused_experts",
            "torch_npu",
            ExpertsQuery(1, 1, 64, 64, "bfloat16"),
            "910B",
            "1 experts",
        ),
    ):
        with pytest.raises(SelectionError) as caught:
            choose(op, query, arch, force={op: name})
        assert why in str(caught.value)


def test_defaults_have_reasons_and_follow_the_device():
    small, large = (
        NpuPlatform().defaults(SHAPE, NpuPlatform.describe(arch)) for arch in ("310P", "910B")
    )
    assert small["model.dtype"].value == "float16" and large["model.dtype"].value == "bfloat16"
    assert small["cache.block_size"].value == large["cache.block_size"].value == 128
    tokens = "scheduler.max_num_batched_tokens"
    assert small[tokens].value < large[tokens].value
    assert all(default.reason for default in (*small.values(), *large.values()))


def test_check_refuses_what_the_device_cannot_compute():
    platform, old = NpuPlatform(), NpuPlatform.describe("310P")
    assert not platform.check(config(), old)  # described: what is installed here does not matter
    (problem,) = platform.check(config("bfloat16"), old)
    assert problem.level == "error" and "float16" in problem.text
    (problem,) = platform.check(config(world=2, worker="inproc"), old)
    assert "--worker process" in problem.text


def test_worker_environment():
    device = NpuPlatform.describe("910B")
    alone, pair = (NpuPlatform().worker_env(device, 0, world) for world in (1, 2))
    assert set(pair) - set(alone) == {"HCCL_OP_EXPANSION_MODE"}
    assert hardware.VISIBLE not in pair  # the index of a device means the same in every process


def test_devices_are_plain_data():
    for arch in NpuPlatform.known_archs():
        fields = dataclasses.asdict(NpuPlatform.describe(arch))
        assert fields["platform"] == "npu" and isinstance(fields["dtypes"], tuple)
