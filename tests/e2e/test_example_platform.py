"""The example of an out-of-tree platform, installed as a vendor's would be: found, forced, served, conformant."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live_server import HEADRACE, live_server
from tests.engine.tiny_models import make_tiny
from tests.fake_platform.plugin import install, on_path

EXAMPLE = Path(__file__).parents[2] / "examples" / "platform"
OWN = ("linear", "rms_norm", "fused_add_rms_norm")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with on_path(install(EXAMPLE, tmp_path_factory.mktemp("example"))) as folder:
        yield folder


def headrace(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HEADRACE, *args], capture_output=True, text=True, cwd=cwd)


def headrace_json(*args: str, cwd: Path) -> dict:
    done = headrace(*args, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_doctor_lists_it(example, tmp_path):
    found = headrace_json("doctor", cwd=tmp_path)
    (row,) = (row for row in found["platforms"] if row["name"] == "example")
    assert [device["spec"] for device in row["devices"]] == ["example:0"]
    assert row["implementations"] == sorted(f"{op}=example" for op in (*OWN, "collectives"))
    assert row["known_archs"] == ["v1", "v2"]


@pytest.mark.parametrize(("device", "verdict"), [("example", "yes"), ("example:v2", "unverified")])
def test_explain_chooses_its_kernels(example, tmp_path, device, verdict):
    make_tiny("llama", tmp_path)
    found = headrace_json("explain", str(tmp_path), "--device", device, cwd=tmp_path)
    chosen = {row["op"]: row["chosen"] for row in found["ops"]}
    assert {op for op, name in chosen.items() if name == "example"} == set(OWN)
    assert {name for op, name in chosen.items() if op not in OWN} == {"reference"}
    for row in found["ops"]:
        for candidate in row["candidates"]:
            if candidate["name"] == "example":
                assert candidate["status"] == verdict and (verdict == "yes") != bool(
                    candidate["reasons"]
                )


def test_what_is_forced_is_used_or_refused(example, tmp_path):
    make_tiny("llama", tmp_path)
    ask = ("explain", str(tmp_path), "--device", "example", "--force")
    found = headrace_json(*ask, "linear=reference", "--disable", "rms_norm=example", cwd=tmp_path)
    chosen = {row["op"]: (row["chosen"], row["forced"]) for row in found["ops"]}
    assert chosen["linear"] == ("reference", True) and chosen["rms_norm"] == ("reference", False)
    found = headrace_json(*ask, "linear=example", cwd=tmp_path)
    assert {(r["chosen"], r["forced"]) for r in found["ops"] if r["op"] == "linear"} == {
        ("example", True)
    }
    refused = headrace(*ask, "paged_attention=example", cwd=tmp_path)
    assert refused.returncode == 2 and "paged_attention has reference" in refused.stderr


@pytest.mark.model
def test_it_serves_a_model(example, smollm2_gguf, tmp_path):
    args = ("--device", "example", "--force", "linear=example", "--max-model-len", "128")
    with live_server(smollm2_gguf, tmp_path, *args) as server:
        answer = server.complete(max_tokens=3)
        assert "Paris" in answer["choices"][0]["text"]
        rows = server.get("/debug/selection").json()
        assert "example" in json.dumps(rows)
        assert "device: example:0 example device, the first generation (v1" in server.log()


def test_its_own_test_passes(example, tmp_path):
    """The one that a vendor copies: `headrace conformance`, from a folder without this repository's files."""
    test = tmp_path / "test_conformance.py"
    test.write_text((EXAMPLE / "tests" / "test_conformance.py").read_text())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout


def test_another_api_version_is_refused_with_one_line(example, tmp_path):
    source = tmp_path / "old"
    for name in ("platform.py", "runtime.py", "ops.py", "__init__.py"):
        text = (EXAMPLE / "src" / "headrace_example" / name).read_text()
        path = source / "src" / "headrace_old" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = text.replace("api_version = 1", "api_version = 0").replace('"example"', '"old"')
        path.write_text(text.replace("headrace_example", "headrace_old"))
    project = (EXAMPLE / "pyproject.toml").read_text()
    project = project.replace("headrace-example", "headrace-old").replace("example =", "old =")
    (source / "pyproject.toml").write_text(project.replace("headrace_example", "headrace_old"))
    with on_path(install(source, tmp_path)):
        done = headrace("serve", "x", "--device", "old", "--port", "0", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr == (
            "headrace: device 'old' cannot be used: platform 'old' was built for platform API 0, this is 1; install "
            "matching releases of headrace and the plugin\n"
        )
        rows = headrace_json("doctor", cwd=tmp_path)["platforms"]
        assert "platform API 0" in next(row["reason"] for row in rows if row["name"] == "old")
        assert any(row["devices"] for row in rows if row["name"] == "cpu")
