"""Runs the README's set-up commands as they are printed, so that they stay true.

`serve`: the first command; waits for the server, asks it a question, stops it. `test`: the second command; what
follows `test` is appended to it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

URL = "http://127.0.0.1:8000"


def commands() -> tuple[str, str]:
    blocks = re.findall(r"```bash\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    if len(blocks) < 2:
        sys.exit("README.md: two bash blocks are expected first: serve, then test")
    return blocks[0].strip(), blocks[1].strip()


def ask(path: str, body: dict | None = None) -> dict:
    request = urllib.request.Request(URL + path, method="POST" if body else "GET")
    request.add_header("content-type", "application/json")
    data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(request, data, timeout=60) as reply:
        return json.load(reply)


def serve(command: str, limit: float = 900.0) -> None:
    print(command, flush=True)
    process = subprocess.Popen(["bash", "-euc", command], start_new_session=True)
    try:
        end = time.monotonic() + limit
        while True:
            if process.poll() is not None:
                sys.exit(f"the README's serve command ended with {process.returncode}")
            if time.monotonic() > end:
                sys.exit(f"the README's serve command was not ready after {limit:.0f} s")
            try:
                ask("/ready")
                break
            except OSError:
                time.sleep(0.5)
        # without its second sentence two first tokens are 0.08 apart: bfloat16 tells them apart by chance
        question = "What is the capital of France? Answer in one sentence."
        chat = {"messages": [{"role": "user", "content": question}], "temperature": 0}
        for _ in range(2):  # the second time most of the prompt is cached
            reply = ask("/v1/chat/completions", {"model": "demo", "max_tokens": 64, **chat})
            text = reply["choices"][0]["message"]["content"]
            print("asked for the capital of France:", text)
            if "Paris" not in text:
                sys.exit("the demo does not know the capital of France")
        # the shell may or may not have replaced itself by the server: signal the whole session
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    first, second = commands()
    if sys.argv[1:] == ["serve"]:
        serve(first)
    elif sys.argv[1:2] == ["test"]:
        second = " ".join([second, *sys.argv[2:]])
        print(second, flush=True)
        sys.exit(subprocess.run(["bash", "-euc", second], check=False).returncode)
    else:
        sys.exit("usage: readme.py serve | test [PYTEST FLAG...]")


if __name__ == "__main__":
    main()
