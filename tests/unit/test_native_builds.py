"""Which build of the native kernels is taken: never one that the CPU could not run, none where none was made."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from headrace.cli import doctor
from headrace.engine.config.settings import EngineConfig
from headrace.platforms.cpu import kernels, platform
from headrace.platforms.cpu.builds import BUILDS, FEATURE, fitting, native_build
from headrace.platforms.cpu.hardware import DESCRIBED, features_of
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.queries import NormQuery
from headrace.platforms.registry import Registry, select


@pytest.fixture
def folder(tmp_path):
    for name in BUILDS:
        (tmp_path / f"_native_{name}.cpython-311-x86_64-linux-gnu.so").write_bytes(b"")
    return tmp_path


def build_of(path) -> str:
    return path.name.split(".")[0].removeprefix("_native_")


def test_the_strongest_build_that_runs(folder):
    want = {
        "portable": "portable",
        "avx2": "avx2",
        "avx512": "avx512",
        "avx512_bf16": "avx512_bf16",
        "amx": "amx",
        "neon": "neon_dot",
        "neon_i8mm": "neon_dot",
        "neon_bf16": "neon_dot",
    }
    found = {
        arch: build_of(native_build(features_of(flags), folder))
        for arch, flags in DESCRIBED.items()
    }
    assert found == want


def test_no_set_of_features_gets_a_build_that_needs_more(folder):
    every = sorted(frozenset().union(*BUILDS.values()))
    for count in range(len(every) + 1):
        for features in map(frozenset, itertools.combinations(every, count)):
            assert BUILDS[build_of(native_build(features, folder))] <= features


def test_x86_never_takes_an_arm_build_nor_the_reverse(folder):
    assert not any(name.startswith("neon") for name in fitting(BUILDS["amx"]))
    assert set(fitting(BUILDS["neon_dot"])) == {"neon_dot", "neon", "portable"}


def test_only_the_chosen_file_is_opened(folder, monkeypatch):
    opened = []

    def refuse(path):
        opened.append(build_of(path))
        raise OSError("not a library")

    monkeypatch.setattr(kernels, "native_build", lambda features: native_build(features, folder))
    monkeypatch.setattr(kernels, "_open", refuse)
    with pytest.raises(OSError, match="not a library"):
        kernels.Kernels(BUILDS["avx2"], 1)
    assert opened == ["avx2"]


@pytest.fixture
def without_builds(tmp_path, monkeypatch):
    """The CPU as it is seen where headrace was installed without a compiler."""
    monkeypatch.setattr(platform, "HERE", tmp_path)
    (device,) = CpuPlatform.probe()
    assert FEATURE not in device.features
    return device


def test_without_a_compiler_pytorch_serves(without_builds):
    registry = Registry.with_reference(CpuPlatform().implementations())
    decision = select("rms_norm", NormQuery(64, "float32"), without_builds, registry)
    assert decision.chosen == "torch"
    native = next(row for row in decision.candidates if row.name == "native")
    assert native.status == "no" and "not built" in native.reasons[0]


def test_what_a_missing_build_costs_is_said(without_builds):
    problems = CpuPlatform().check(EngineConfig(), without_builds)
    (text,) = [problem.text for problem in problems if "native kernels" in problem.text]
    assert "pip install" in text and "C++ compiler" in text
    assert any("native kernels" in line for line in doctor.examine()["advice"])
    built = dataclasses.replace(without_builds, features=without_builds.features | {FEATURE})
    assert not any("native" in p.text for p in CpuPlatform().check(EngineConfig(), built))
