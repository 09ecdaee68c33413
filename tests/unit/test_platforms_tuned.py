"""Files of tuned launch options: what is written is read, what is broken or foreign is refused in a sentence."""

from __future__ import annotations

import dataclasses
import json

import pytest

from headrace.engine.config import env
from headrace.platforms import tuned
from headrace.platforms.queries import AttentionQuery, LinearQuery
from headrace.platforms.registry import Requirement

DEVICE = "NVIDIA H200"
KEY = tuned.key("row", LinearQuery(64, 96, "bfloat16"), {})
OPTIONS = {KEY: {"BLOCK_N": 2, "num_warps": 4}}


@pytest.fixture(autouse=True)
def version(monkeypatch):
    monkeypatch.setattr(tuned, "triton_version", lambda: "3.6.0")


def test_keys_name_what_a_kernel_is_compiled_for():
    assert KEY == "row LinearQuery(in_features=64, out_features=96, dtype=bfloat16)"
    query = AttentionQuery(8, 2, 64, 64, "float16", "float16", 0.125, window=7)
    key = tuned.key("prefill", query, {"BLOCK_M": 128, "BLOCK_N": 64})
    assert key.endswith("kv_dtype=float16, window=7) BLOCK_M=128") and "scale" not in key


def test_what_is_written_is_read_and_added_to(tmp_path):
    path = tmp_path / "new" / "file.json"
    tuned.write(path, DEVICE, OPTIONS)
    found = tuned.read(path, DEVICE)
    assert found.options == OPTIONS and found.made and not found.problem
    tuned.write(path, DEVICE, {"other": {"num_stages": 3}})
    assert tuned.read(path, DEVICE).options == {**OPTIONS, "other": {"num_stages": 3}}
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


def test_a_choice_holds_for_the_packages_it_was_measured_with(tmp_path, monkeypatch):
    installed = {"flashinfer-python": "0.7.4", "triton": "3.6.0"}
    monkeypatch.setattr(tuned, "installed_version", installed.get)
    path, query = tmp_path / "file.json", AttentionQuery(8, 2, 64, 64, "float16", "float16", 0.125)
    entry = tuned.choice(
        "flashinfer",
        [
            Requirement("flashinfer-python", ">=0.7"),
            Requirement("triton", aliases=("triton-rocm",)),
        ],
    )
    assert entry == {"implementation": "flashinfer", "versions": installed}
    name = tuned.key("paged_attention", query, {})
    tuned.write(path, DEVICE, {**OPTIONS, name: entry})
    found = tuned.read(path, DEVICE)
    assert not found.problem and found.options == {**OPTIONS, name: entry}
    assert tuned.chosen(found.options, "paged_attention", query) == "flashinfer"
    other = dataclasses.replace(query, window=7)
    for nothing in ((found.options, "linear", query), (found.options, "paged_attention", other)):
        assert tuned.chosen(*nothing) == ""
    for version in ("0.8.0", None):
        monkeypatch.setitem(installed, "flashinfer-python", version)
        found = tuned.read(path, DEVICE)
        assert found.options == OPTIONS  # those of the shared kernels hold
        assert tuned.chosen(found.options, "paged_attention", query) == ""
        assert "flashinfer was measured with flashinfer-python 0.7.4" in found.problem
        assert str(path) in found.problem and (version or "not installed") in found.problem


def test_no_file_is_no_problem(tmp_path):
    assert tuned.read(tmp_path / "none.json", DEVICE) == tuned.Tuned()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"device": "NVIDIA A100"}, "made for NVIDIA A100 with Triton 3.6.0, this is NVIDIA H200"),
        ({"triton": "3.5.0"}, "with Triton 3.5.0"),
        ({"format": 3}, "format 3"),
        ({"options": {KEY: {"BLOCK_N": "2"}}}, "BLOCK_N='2'"),
        ({"options": {KEY: {"BLOCK_N": True}}}, "BLOCK_N=True"),
        ({"options": {KEY: {"BLOCK_N": 0}}}, "BLOCK_N=0"),
        ({"options": {KEY: {"PRECISION": 1}}}, "PRECISION=1"),
        ({"options": {KEY: {"implementation": "x"}}}, "KeyError"),
        ({"options": [1]}, "AttributeError"),
        ({"options": {KEY: None}}, "AttributeError"),
    ],
)
def test_foreign_and_broken_files_are_refused(tmp_path, change, why):
    path = tmp_path / "file.json"
    tuned.write(path, DEVICE, OPTIONS)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    found = tuned.read(path, DEVICE)
    assert not found.options and why in found.problem
    assert str(path) in found.problem and "bench tune" in found.problem
    tuned.write(path, DEVICE, {"other": {"num_stages": 3}})  # is replaced
    assert tuned.read(path, DEVICE).options == {"other": {"num_stages": 3}}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', "\ud800"])
def test_no_json_is_refused(tmp_path, text):
    path = tmp_path / "file.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    found = tuned.read(path, DEVICE)
    assert not found.options and str(path) in found.problem


def test_a_folder_in_its_place_is_refused(tmp_path):
    assert "not used" in tuned.read(tmp_path, DEVICE).problem


def test_the_file_lies_in_the_cache_under_the_device_s_name(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    assert env.tuned_file("NVIDIA H200 (PCIe)") == tmp_path / "tuned" / "nvidia-h200-pcie.json"
