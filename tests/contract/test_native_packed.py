"""Packed weights on disk: taken at the second start, and never when they do not fit."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from headrace.cli import doctor
from headrace.engine.weights import packed
from headrace.engine.weights.source import ModelFiles
from headrace.platforms.cpu.builds import FEATURE
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.queries import EmbeddingQuery, ExpertsQuery, LinearQuery
from tests.contract.native_builds import blocks

LINEAR = LinearQuery(64, 40, "float32", "Q8_0", bias=True)


class Start:
    """One start of a server that keeps packed weights: what it read, and the results of its ops."""

    def __init__(self, path: Path, identity: str = "a") -> None:
        from headrace.platforms.cpu.experts import NativeExperts
        from headrace.platforms.cpu.native_ops import NativeEmbedding, NativeLinear

        device = CpuPlatform.probe()[0]
        if FEATURE not in device.features:
            pytest.skip("the native kernels are not built on this machine")
        self.read: list[str] = []
        runtime = CpuPlatform().open(device)
        x = torch.linspace(-1, 1, 192).view(3, 64)
        rows, bias = blocks("Q8_0", 40, 64), torch.ones(40)
        w13, w2 = torch.linspace(-1, 1, 2 * 64 * 64).view(2, 64, 64), torch.ones(2, 64, 32)
        with runtime.packed_weights(path, identity):
            linear = NativeLinear(LINEAR, runtime)
            table = NativeEmbedding(EmbeddingQuery(40, 64, "float32", "Q8_0"), runtime)
            experts = NativeExperts(ExpertsQuery(2, 1, 64, 32, "float32"), runtime)
            made = (
                linear.pack_named("linear", self._reads("linear", rows), bias),
                table.pack_named("table", self._reads("table", rows)),
                experts.pack_named("moe", self._reads("w13", w13), self._reads("w2", w2)),
            )
        ids = torch.tensor([[1], [0], [1]], dtype=torch.int32)
        self.results = (
            linear(x, made[0]),
            table(torch.tensor([0, 39, 17]), made[1]),
            experts(x, torch.ones(3, 1), ids, made[2]),
        )
        runtime.close()

    def _reads(self, name, value):
        def read():
            self.read.append(name)
            return value

        return read

    def same(self, other: Start) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.results, other.results, strict=True))


ALL = ["linear", "table", "w13", "w2"]


def test_the_second_start_reads_nothing(tmp_path):
    path = tmp_path / "deep" / "m.packed"
    first, second = Start(path), Start(path)
    assert sorted(first.read) == ALL and second.read == []
    assert second.same(first)
    assert [file.name for file in path.parent.iterdir()] == [
        "m.packed"
    ]  # nothing is left beside it


def test_another_model_takes_the_files_place(tmp_path):
    path = tmp_path / "m.packed"
    first = Start(path, "a")
    assert sorted(Start(path, "b").read) == ALL
    assert Start(path, "b").read == []
    assert sorted(Start(path, "a").read) == ALL and Start(path).same(first)


@pytest.mark.parametrize("where", [0, 12, 100])
def test_a_damaged_header_counts_as_no_file(tmp_path, where):
    path = tmp_path / "m.packed"
    first = Start(path)
    flip(path, where)
    second = Start(path)
    assert sorted(second.read) == ALL and second.same(first)
    assert Start(path).read == []


def test_damaged_data_is_packed_again_alone(tmp_path, caplog):
    path = tmp_path / "m.packed"
    first = Start(path)
    flip(path, 4096 + 70)  # the first matrix lies behind the header
    second = Start(path)
    assert second.read == ["linear"] and second.same(first)
    assert "is damaged" in caplog.text
    assert Start(path).read == []


@pytest.mark.parametrize("left", [0, 5, 4000, 5000, 9000])
def test_a_cut_file(tmp_path, left):
    path = tmp_path / "m.packed"
    first = Start(path)
    os.truncate(path, left)
    second = Start(path)
    assert second.read and second.same(first)
    assert Start(path).read == []


def test_a_disk_that_takes_nothing_is_no_reason_not_to_serve(tmp_path, caplog):
    blocker = tmp_path / "file"
    blocker.write_text("")
    start = Start(blocker / "m.packed")
    assert sorted(start.read) == ALL and "packed weights are not kept" in caplog.text


def test_without_native_kernels_it_is_refused(tmp_path):
    device = CpuPlatform.probe()[0]
    device = dataclasses.replace(device, features=device.features - {FEATURE})
    runtime = CpuPlatform().open(device)
    with (
        pytest.raises(ValueError, match="--packed-cache"),
        runtime.packed_weights(tmp_path / "x", ""),
    ):
        pass


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def test_identity_and_place(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    weights = tmp_path / "w.gguf"
    weights.write_bytes(b"12345")
    files = ModelFiles("m", "gguf", str(tmp_path), (str(weights),))
    before = packed.identity(files)
    assert packed.identity(files) == before
    os.utime(weights, ns=(1, 1))
    assert packed.identity(files) != before
    assert packed.packed_file(files, 0, 2) != packed.packed_file(files, 1, 2)
    assert doctor.examine()["cache"]["packed"] == {"files": 0, "bytes": 0}
    place = packed.packed_file(files, 0, 1)
    place.parent.mkdir(parents=True)
    place.write_bytes(b"123")
    assert doctor.examine()["cache"]["packed"] == {"files": 1, "bytes": 3}
