"""serve, chat, complete and bench on a real model, as a person types them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytestmark = pytest.mark.model

HEADRACE = (sys.executable, "-m", "headrace.cli.main")
SMALL = ("--max-model-len", "2k", "--kv-cache-memory-bytes", "256MiB")


class Server:
    """`headrace serve` in a process of its own: its plain start-up lines by name, and its address."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [*HEADRACE, "serve", *args, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: dict[str, str] = {}
        assert self.process.stdout is not None
        for line in self.process.stdout:
            name, _, text = line.rstrip("\n").partition(": ")
            self.lines[name] = text
            if name == "try":
                break
        else:
            raise AssertionError(self.process.communicate()[1])
        self.url = self.lines["URL"].removesuffix("/v1")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[Server]:
    running = Server(str(smollm2_gguf), *SMALL)
    yield running
    running.process.kill()
    running.process.wait()


def headrace(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HEADRACE, *args], input=stdin, capture_output=True, text=True, timeout=180, check=False
    )


def test_start_up_lines_say_what_runs(server: Server) -> None:
    lines = server.lines
    assert "llama, 135 M parameters, Q4_1" in lines["model"]
    assert lines["device"].startswith("cpu:0 ")
    assert lines["dtype"].split()[0] in ("bfloat16", "float32")
    assert lines["context"] == "2,000 tokens (flag --max-model-len)"
    assert "30 layers x 2 x 3 heads x 64" in lines["KV cache"]
    assert "linear" in lines["kernels"] and "paged_attention" in lines["kernels"]
    assert re.match(r"\d+\.\d\d s \(settings .*weights ", lines["ready in"])


def test_the_curl_example_works(server: Server) -> None:
    done = subprocess.run(
        server.lines["try"], shell=True, capture_output=True, text=True, timeout=120
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["content"], done.stderr


def test_explain_tells_what_the_server_chose(server: Server, smollm2_gguf: Path) -> None:
    running = httpx.get(f"{server.url}/debug/selection").json()["selection"]
    told = json.loads(headrace("explain", str(smollm2_gguf), "--json").stdout)["ops"]
    assert _choices(running) == _choices(told)


def _choices(rows: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(row["op"], json.dumps(row["query"], sort_keys=True), row["chosen"]) for row in rows}


def test_model_names(server: Server, smollm2_gguf: Path) -> None:
    def ask(**body: object) -> httpx.Response:
        given = {"prompt": "Hi", "max_tokens": 1, **body}
        return httpx.post(f"{server.url}/v1/completions", json=given, timeout=60)

    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [row["id"] for row in listed] == [smollm2_gguf.name]
    for body in ({"model": smollm2_gguf.name}, {"model": str(smollm2_gguf)}, {}):
        assert ask(**body).status_code == 200, body
    for wrong in ("gpt-4o", "", "demo"):
        refused = ask(model=wrong)
        assert refused.status_code == 404, wrong
        assert refused.json()["error"]["code"] == "model_not_found"


def test_complete_against_the_server(server: Server) -> None:
    args = ("complete", "--url", server.url, "--temperature", "0", "-n", "8")
    told = headrace(*args, "The capital of France is")
    piped = headrace(*args, stdin="The capital of France is")
    whole = headrace(*args, "The capital of France is", "--json")
    assert told.returncode == 0, told.stderr
    assert "Paris" in told.stdout
    assert told.stdout == piped.stdout
    assert json.loads(whole.stdout)["choices"][0]["text"] + "\n" == told.stdout
    as_chat = headrace(*args, "Say hello.", "--chat", "--json")
    assert json.loads(as_chat.stdout)["object"] == "chat.completion"


def test_chat_against_the_server(server: Server) -> None:
    lines = "/set temperature 0\n/set max_tokens 12\nHello!\n/system Answer briefly.\nHello!\n/exit\nx\n"
    done = headrace("chat", "--url", f"{server.url}/v1", stdin=lines)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 10
    assert "temperature = 0.0" in done.stderr and "Answer briefly." in done.stderr


def test_ctrl_c_stops_the_answer_and_not_the_program(server: Server) -> None:
    chat = subprocess.Popen(
        [*HEADRACE, "chat", "--url", server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert chat.stdin is not None and chat.stdout is not None
    chat.stdin.write("/set temperature 0\nCount from one to five hundred in words.\n")
    chat.stdin.flush()
    assert chat.stdout.read(5)
    chat.send_signal(signal.SIGINT)
    out, err = chat.communicate("/exit\n", timeout=60)
    assert chat.returncode == 0, err
    assert "(stopped)" in err and "five hundred" not in out
    deadline = time.monotonic() + 5
    while not re.search(r"^headrace_requests_running{.*} 0\.0$", _metrics(server), re.MULTILINE):
        assert time.monotonic() < deadline, _metrics(server)
        time.sleep(0.1)


def _metrics(server: Server) -> str:
    return httpx.get(f"{server.url}/metrics").text


def test_bench_against_the_server(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    load = (
        "--concurrency",
        "1,2",
        "--num-requests",
        "2",
        "--prompt-tokens",
        "33",
        "--output-tokens",
        "6",
    )
    done = headrace("bench", "serve", "--url", server.url, *load, "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "concurrency 2" in done.stdout and "time to first token" in done.stdout
    data = json.loads(file.read_text())
    assert [row["requests"] for row in data["results"]] == [2, 2]
    for row in data["results"]:
        assert row["failed"] == 0
        assert (row["prompt_tokens"], row["output_tokens"], row["cached_tokens"]) == (66, 12, 0)
        assert row["ttft_ms"]["p50"] > 0 and row["tpot_ms"]["p99"] > 0
    assert data["command"] == "bench serve" and data["machine"]["cpu"] and data["versions"]["torch"]
    assert data["arguments"]["levels"]["concurrency 2"]["concurrency"] == 2


def test_plot_needs_matplotlib_and_says_so_before_it_measures() -> None:
    done = headrace("bench", "serve", "--url", "http://127.0.0.1:9", "--plot", "x.png")
    if "matplotlib" not in done.stderr:
        pytest.skip("matplotlib is installed here")
    assert done.returncode == 2
    assert done.stderr.strip() == "headrace: --plot needs matplotlib: pip install 'headrace[plot]'"


def test_a_model_is_served_for_one_command(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_TEST_MARK", str(tmp_path))  # its children have it, too
    done = headrace(
        "complete",
        "Once",
        "-m",
        str(smollm2_gguf),
        "-n",
        "3",
        "--json",
        "--served-model-name=fox",
        *SMALL,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["model"] == "fox" and answer["usage"]["completion_tokens"] == 3
    assert done.stderr == ""
    assert not [process for process in psutil.process_iter() if _is_marked(process, tmp_path)]


def _is_marked(process: psutil.Process, mark: Path) -> bool:
    try:
        return process.environ().get("HEADRACE_TEST_MARK") == str(mark)
    except psutil.Error:
        return False


def test_served_from_a_yaml_file_on_one_processor(smollm2_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"model: {smollm2_gguf}\nserved-model-name: [a, b]\ncontext-length: 1k\napi-key: secret\n"
        "cache: {kv_cache_memory: 64MiB}\n"
    )
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        running = Server("--config", str(file))
    finally:
        os.sched_setaffinity(0, allowed)
    try:
        assert running.lines["context"] == f"1,000 tokens (file {file}:3 context-length)"
        assert "64.0 MiB" in running.lines["KV cache"]
        assert '"Authorization: Bearer $HEADRACE_API_KEY"' in running.lines["try"]
        refused = headrace("complete", "Hi", "--url", running.url)
        assert refused.returncode == 1 and "give the key with --key" in refused.stderr
        args = ("complete", "Hi", "--url", running.url, "--key", "secret", "-n", "2", "--json")
        assert json.loads(headrace(*args).stdout)["model"] == "a"
        assert running.stop() == 0
    finally:
        running.process.kill()


def test_bench_startup(smollm2_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    done = headrace(
        "bench", "startup", str(smollm2_gguf), "--repeats", "1", "--idle-seconds", "0.5", *SMALL,
        "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["results"]
    assert row["ready_s"] > 0 and row["first_token_s"] > 0
    assert row["processes"] >= 2
    assert 50e6 < row["resident_bytes"] <= row["rss_bytes"]
    assert row["idle_cpu_percent"] >= 0
