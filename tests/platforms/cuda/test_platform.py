"""The CUDA platform without a device: described architectures, verdicts, defaults, and why there is no device."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from headrace.platforms.cuda import hardware
from headrace.platforms.cuda.platform import VERIFIED, CudaPlatform
from headrace.platforms.platform import ModelShape
from headrace.platforms.queries import AttentionQuery, LinearQuery, NormQuery
from headrace.platforms.registry import Policy, Registry, SelectionError, select
from headrace.platforms.triton.rows import NEWER

SHAPE = ModelShape("llama", 32, 4096, 32, 8, 128, 128256, 8_030_000_000, "bfloat16", 131072)


def choose(op, query, arch, **policy):
    registry = Registry.with_reference(CudaPlatform().implementations())
    device = CudaPlatform.describe(arch)
    versions = {"triton": "3.6.0"}.get
    return select(op, query, device, registry, Policy(**policy), versions=versions)


def attention(dtype="bfloat16", size=128, **options):
    return AttentionQuery(32, 8, size, size, dtype, options.pop("kv", dtype), 0.1, **options)


@pytest.mark.parametrize("arch", CudaPlatform.known_archs())
def test_described_architectures(arch):
    device = CudaPlatform.describe(arch)
    assert device.arch == arch and device.memory and device.units
    assert ("bfloat16" in device.dtypes) == ("bf16" in device.features) == (arch != "sm_75")
    decision = choose("paged_attention", attention(device.dtypes[0]), arch)
    assert decision.chosen == "triton"
    row = next(row for row in decision.candidates if row.name == "triton")
    tried = arch in VERIFIED and "paged_attention" not in NEWER
    assert row.status == ("yes" if tried else "unverified")


def test_an_unknown_architecture_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="sm_90"):
        CudaPlatform.describe("sm_1")


def test_what_the_kernels_cannot_do_is_said():
    for op, query, arch, why in (
        ("paged_attention", attention("bfloat16"), "sm_75", "does not compute in bfloat16"),
        ("paged_attention", attention(size=512), "sm_90", "heads of 512"),
        ("paged_attention", attention(kv="fp8_e4m3"), "sm_80", "sm_80 does not convert fp8_e4m3"),
        ("paged_attention", attention(kv="int8"), "sm_90", "KV in int8"),
        ("linear", LinearQuery(4096, 4096, "bfloat16", "Q4_K"), "sm_90", "dequantized at load"),
        ("rms_norm", NormQuery(1 << 20, "bfloat16"), "sm_90", "rows of 1048576"),
    ):
        with pytest.raises(SelectionError) as caught:
            choose(op, query, arch, force={op: "triton"})
        assert why in str(caught.value)


def test_without_triton_the_reference_serves():
    registry = Registry.with_reference(CudaPlatform().implementations())
    device = CudaPlatform.describe("sm_90")
    decision = select("rms_norm", NormQuery(64, "float32"), device, registry, versions=lambda _: "")
    assert decision.chosen == "reference"


def test_defaults_have_reasons_and_follow_the_device():
    small, large = (
        CudaPlatform().defaults(SHAPE, CudaPlatform.describe(a)) for a in ("sm_75", "sm_90")
    )
    assert small["model.dtype"].value == "float16" and large["model.dtype"].value == "bfloat16"
    tokens = "scheduler.max_num_batched_tokens"
    assert small[tokens].value < large[tokens].value
    assert all(default.reason for default in (*small.values(), *large.values()))
    mixed, device = "scheduler.max_num_mixed_tokens", CudaPlatform.describe("sm_90")
    sparse = CudaPlatform().defaults(dataclasses.replace(SHAPE, experts=128), device)
    assert large[mixed].value < sparse[mixed].value < large[tokens].value


def config(dtype="auto", world=1, worker="auto"):
    device = SimpleNamespace(tensor_parallel_size=world, worker=worker)
    return SimpleNamespace(model=SimpleNamespace(dtype=dtype), device=device)


def test_check_refuses_what_the_device_cannot_compute(monkeypatch):
    monkeypatch.setattr(hardware, "version_of", lambda _: "3.6.0")
    platform, old = CudaPlatform(), CudaPlatform.describe("sm_75")
    assert not platform.check(config(), old)
    (problem,) = platform.check(config("bfloat16"), old)
    assert problem.level == "error" and "float16" in problem.text
    ancient = dataclasses.replace(old, arch="sm_61")
    assert any("--device cpu" in found.text for found in platform.check(config(), ancient))
    monkeypatch.setattr(hardware, "version_of", lambda _: "")
    assert not platform.check(config(), old)  # described: what is installed here says nothing of it
    here = dataclasses.replace(old, versions={"driver CUDA": "13.0"})
    assert [found.level for found in platform.check(config(), here)] == ["warning"]


def test_a_torch_without_cuda_is_said(monkeypatch):
    found = hardware.Found("H", "sm_90", 1 << 30, 132)
    monkeypatch.setattr(hardware, "devices", lambda: ([found], "13.0"))
    monkeypatch.setattr(hardware, "torch_cuda", lambda: "")
    with pytest.raises(RuntimeError, match="has no CUDA"):
        CudaPlatform.probe()
    monkeypatch.setattr(hardware, "torch_cuda", lambda: "13.0")
    (device,) = CudaPlatform.probe()
    assert device.spec == "cuda:0" and device.versions["driver CUDA"] == "13.0"


def test_no_driver_is_a_sentence(monkeypatch):
    def missing(_name):
        raise OSError("libcuda.so.1: no such file")

    monkeypatch.setattr(hardware.ctypes, "CDLL", missing)
    with pytest.raises(hardware.DriverError, match="cannot be loaded"):
        hardware.devices()
