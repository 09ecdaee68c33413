"""Mistakes on the command line end in one line, with the right exit code, before anything is loaded."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.tiny_gguf import write_tiny_gguf

OFFLINE = {  # whoever asks the network fails at once
    "HF_HUB_OFFLINE": "1",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
}


ANY_PORT = ("--port", "0")  # several tests run at once


def headrace(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", *args],
        env={**os.environ, **OFFLINE, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def one_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, done.stderr
    *before, last = done.stderr.splitlines()
    assert last.startswith("headrace: ")
    assert "Traceback" not in done.stderr
    assert not [line for line in before if line.startswith("headrace: ")]
    return last


@pytest.mark.parametrize("command", ["serve", "explain"])
def test_no_model(command: str) -> None:
    assert one_line(headrace(command), 2) == "headrace: no model; example: headrace serve demo"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("/nowhere/model.gguf",), "/nowhere/model.gguf does not exist"),
        (("demo", "--device", "abacus"), "no platform named 'abacus'"),
        (("demo", "--port", "x"), "--port: expected a whole number, 0 to 65535"),
        (("demo", "--config", "/nowhere.yaml"), "cannot read /nowhere.yaml"),
        (("demo", "--uds", "/tmp/x.sock", "--port", "1"), "drop --host and --port"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_settings(args: tuple[str, ...], words: str) -> None:
    port = () if {"--port", "--uds"} & set(args) else ANY_PORT
    assert words in one_line(headrace("serve", *args, *port), 2)


@pytest.mark.model
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--max-model-len", "100k"), "--max-model-len: 100000 tokens are more than"),
        (("--context-length=100k",), "--context-length: 100000 tokens are more than"),
        (("--force", "linear=abacus"), "cannot force linear=abacus: linear has"),
        (("--force", "nonsense=reference"), "no op 'nonsense'"),
        (("--disable", "abacus"), "cannot disable 'abacus'"),
        (("--tp", "2"), "9 attention heads cannot be divided over 2 workers"),
        (("--dtype", "int8"), "none of auto, float32"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_settings_that_do_not_suit_the_model(
    smollm2_gguf: Path, args: tuple[str, ...], words: str
) -> None:
    assert words in one_line(headrace("serve", str(smollm2_gguf), *args, *ANY_PORT), 2)


@pytest.mark.model
def test_everything_disabled_shows_the_table_first(smollm2_gguf: Path) -> None:
    done = headrace("serve", str(smollm2_gguf), "--disable", "torch,native,reference", *ANY_PORT)
    assert "no implementation can serve" in one_line(done, 2)
    rows = [line.split() for line in done.stderr.splitlines()[:-1]]
    assert ["reference", "no", "disabled", "by", "'reference'"] in rows


@pytest.mark.model
def test_port_in_use(smollm2_gguf: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        last = one_line(headrace("serve", str(smollm2_gguf), "--port", port), 1)
    assert f"127.0.0.1:{port}" in last and "in use" in last and "--port" in last


@pytest.mark.model
def test_damaged_file(smollm2_gguf: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(smollm2_gguf.read_bytes()[:-1_000_000])
    assert "short.gguf" in one_line(headrace("serve", str(short), *ANY_PORT), 2)


@pytest.mark.model
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--kv-cache-memory-bytes", "64TiB"), "a KV cache of 64.0 TiB does not fit the "),
        (("--max-model-len", "4k", "--num-gpu-blocks-override", "9"), "a context of 4000 tokens"),
    ],
)
def test_what_the_engine_finds_out_is_said_once(
    smollm2_gguf: Path, args: tuple[str, ...], words: str
) -> None:
    done = headrace("serve", str(smollm2_gguf), "--port", "0", *args)
    assert words in one_line(done, 1)
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_nobody_at_the_address(command: str) -> None:
    args = ("hi",) if command == "complete" else ()
    last = one_line(headrace(command, *args, "--url", "http://127.0.0.1:9"), 1)
    assert "no server answers at http://127.0.0.1:9" in last


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("chat", "demo", "--url", "x:1"), "give one of the two"),
        (("chat", "--dtype", "float32"), "--dtype set up a server"),
        (("bench", "serve", "--concurrency", "none"), "expected numbers such as 1,4,16"),
        (("complete", "hi", "--url", "ftp://x"), "is not a server's address"),
        (("complete", "--url", "http://127.0.0.1:9"), "no prompt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_combinations(args: tuple[str, ...], words: str) -> None:
    assert words in one_line(headrace(*args), 2)


def test_explain_needs_no_weights(tmp_path: Path) -> None:
    from headrace.cli.conformance.models import make_model

    folder = make_model("llama", tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((folder / "config.json").read_bytes())
    whole, bare = (
        json.loads(headrace("explain", str(path), "--device", "cuda:sm_90", "--json").stdout)
        for path in (folder, tmp_path / "bare")
    )
    assert bare["ops"] == whole["ops"] and bare["parameters"] == whole["parameters"]
    assert bare["warnings"][0].endswith("this is what its config.json alone says")
    refused = one_line(headrace("serve", str(tmp_path / "bare")), 2)
    assert "holds no weights" in refused


def test_blocks_without_a_kernel_are_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", "Q4_K")
    words = (str(tmp_path / "tiny.gguf"), "--device", "cuda:sm_90")
    refused = one_line(headrace("explain", *words, "--weights", "blocks"), 2)
    assert "--weights blocks has no kernel for Q4_K on cuda:0" in refused
    told = json.loads(headrace("explain", *words, "--json").stdout)  # dequantized at load
    linears = [row for row in told["ops"] if row["op"] == "linear"]
    assert linears and all(row["query"]["scheme"] == "" for row in linears)


@pytest.mark.model
def test_gguf_path_needs_no_network_and_its_header_decides(smollm2_gguf: Path) -> None:
    done = headrace("explain", str(smollm2_gguf), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["architecture"] == "llama" and told["scheme"] == "Q4_1"
    assert told["kv"]["max_model_len"] == 8192
    assert (told["kv"]["kv_heads"], told["kv"]["head_dim"]) == (3, 64)
    sizes = {"bfloat16": 2, "float16": 2, "float32": 4}
    assert told["kv"]["bytes_per_token"] == 30 * 2 * 3 * 64 * sizes[told["dtype"]]
    assert all(row["candidates"] for row in told["ops"])
    assert {"linear", "paged_attention", "sample"} <= {row["op"] for row in told["ops"]}


@pytest.mark.model
def test_explain_a_cpu_that_is_not_here(smollm2_gguf: Path) -> None:
    done = headrace("explain", str(smollm2_gguf), "--device", "cpu:avx2", "--json")
    told = json.loads(done.stdout)
    assert told["device"]["arch"] == "avx2" and not told["device"]["present"]
    assert told["dtype"] == "float32"
    wrong = headrace("explain", str(smollm2_gguf), "--device", "cpu:abacus")
    assert "known: portable, avx2" in one_line(wrong, 2)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no processor affinity here")
@pytest.mark.model
def test_threads_stay_within_the_processors_that_may_be_used(smollm2_gguf: Path) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        doctor = json.loads(headrace("doctor", "--json").stdout)
        told = json.loads(headrace("explain", str(smollm2_gguf), "--json").stdout)
    finally:
        os.sched_setaffinity(0, allowed)
    cpu = next(row for row in doctor["platforms"] if row["name"] == "cpu")
    assert cpu["devices"][0]["units"] == 1
    assert told["device"]["units"] == 1


def test_doctor_works_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch in this test')\n")
    done = headrace("doctor", "--json", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert any(row["devices"] for row in told["platforms"])
    assert {row["name"] for row in told["packages"]} >= {"torch", "fastapi"}
    assert headrace("doctor", env={"PYTHONPATH": str(tmp_path)}).returncode == 0
