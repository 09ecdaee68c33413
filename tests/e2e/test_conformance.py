"""`headrace conformance` with implementations that are wrong, that raise, that crash and that hang: nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace.platforms.ops import CONTRACTS
from headrace.platforms.reference.queries import queries
from tests.e2e.live_server import HEADRACE
from tests.fake_platform.plugin import on_path

# The CPU under another name, with implementations of one op that go wrong in every way.
BRITTLE = """
import dataclasses, os, time

from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.registry import Check, Implementation, Requirement


def _only_new(query, device):
    return Check().need(query.dtype == "float32", "float32 only").doubt("never run here").verdict()


class Brittle(CpuPlatform):
    name = "brittle"
    priority = -20

    @classmethod
    def probe(cls):
        return [dataclasses.replace(CpuPlatform.probe()[0], platform="brittle")]

    def implementations(self):
        home = "headrace.platforms.reference.ops:silu_and_mul"
        for name in ("right", "wrong", "raises", "crashes", "hangs"):
            target = home if name == "right" else f"brittle:{name}"
            supports = {"supports": _only_new} if name == "wrong" else {}
            yield Implementation("silu_and_mul", name, target, rank=10, **supports)
        yield Implementation("silu_and_mul", "gone", "brittle:gone", rank=5)
        need = (Requirement("brittle-kernels", ">=2"),)
        yield Implementation("silu_and_mul", "missing", "brittle_kernels:f", rank=5, requires=need)


def right(x):
    from headrace.platforms.reference.ops import silu_and_mul
    return silu_and_mul(x)


def wrong(x):
    return right(x) * (1 + 1e-4)


def raises(x):
    if x.shape == (5, 200):
        raise RuntimeError("the kernel\\ndid not start")
    return right(x)


def crashes(x):
    print("about to crash", flush=True)
    os.abort()


def hangs(x):
    if x.shape == (5, 200) and str(x.dtype) == "torch.float32":
        open("hanging", "w").close()
        time.sleep(600)
    return right(x)
"""


@pytest.fixture(scope="module")
def brittle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("brittle")
    (folder / "brittle.py").write_text(BRITTLE)
    facts = folder / "brittle-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: brittle\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[headrace.platforms]\nbrittle = brittle:Brittle\n")
    with on_path(folder):
        yield folder


def conformance(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*HEADRACE, "conformance", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=dict(os.environ))


def test_a_broken_implementation_costs_nothing_but_its_own_tests(brittle, tmp_path):
    args = ("--device", "brittle", "--op", "silu_and_mul", "--time-limit", "10")
    done = conformance(*args, "--json", "report.json", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["complete"] and report["device"]["platform"] == "brittle"
    assert report["versions"]["brittle"] == "1.0" and report["versions"]["torch"]
    rows = {row["implementation"]: row for row in report["implementations"]}
    cases = 3 * len(queries("silu_and_mul"))

    assert (rows["right"]["passed"], rows["right"]["failed"]) == (cases, 0)
    assert rows["right"]["largest_error_over_tolerance"] == 0.0
    assert rows["right"]["verdict"] == "yes"

    wrong = rows["wrong"]
    assert (wrong["verdict"], wrong["reasons"]) == ("unverified", ["never run here"])
    assert wrong["failed"] > 0 and wrong["largest_error_over_tolerance"] > 1
    assert wrong["skipped"] == 6 and "times the tolerance" in wrong["first_failure"]

    assert (rows["raises"]["passed"], rows["raises"]["failed"]) == (cases - 3, 3)
    assert "T=5: RuntimeError: the kernel did not start" in rows["raises"]["first_failure"]

    crashes = rows["crashes"]
    assert (crashes["passed"], crashes["failed"]) == (0, len(queries("silu_and_mul")))
    assert "T=1: the process was ended by SIGABRT" in crashes["first_failure"]
    texts = [row["text"] for row in report["results"] if row["implementation"] == "crashes"]
    assert sum("SIGABRT" in text for text in texts) == 3
    assert texts[-1] == "not run: it ended the process 3 times"

    hangs = rows["hangs"]
    assert (hangs["passed"], hangs["failed"]) == (cases - 3, 1)
    assert "T=5: no answer within 10 s" in hangs["first_failure"]

    assert "brittle has no 'gone'" in rows["gone"]["first_failure"]
    assert (rows["missing"]["verdict"], rows["missing"]["failed"]) == ("no", 0)
    assert "brittle-kernels" in rows["missing"]["reasons"][0]
    for name in rows:
        assert name in done.stdout


def test_one_implementation_and_one_area(tmp_path):
    args = ("--device", "cpu", "--op", "rms_norm=reference", "--op", "memory")
    done = conformance(*args, "--json", "r.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert {row["op"] for row in report["implementations"]} == {"rms_norm", "memory"}
    assert report["passed"] == 6 and report["failed"] == 0
    assert "test 1 of" in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--device", "abacus"), "no platform named 'abacus'"),
        (("--device", "cpu", "--op", "linaer"), "did you mean linear?"),
        (("--device", "cpu", "--op", "linear=magic"), "linear has native, torch, reference on cpu"),
        (("--device", "cpu", "--json", "no/such/folder.json"), "cannot write no/such/folder.json"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(tmp_path, args, said):
    done = conformance(*args, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1


def test_every_op_has_queries():
    assert all(queries(op) for op in CONTRACTS)


def test_nothing_outlives_a_parent_that_was_killed(brittle, tmp_path):
    """Not even a kernel that hangs, in a session of its own."""
    args = (
        "conformance",
        "--device",
        "brittle",
        "--op",
        "silu_and_mul=hangs",
        "--time-limit",
        "500",
    )
    log = tmp_path / "log"
    with log.open("w") as said:
        process = subprocess.Popen([*HEADRACE, *args], cwd=tmp_path, stdout=said, stderr=said)
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "hanging").exists() and time.monotonic() < end:
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children, log.read_text()
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
