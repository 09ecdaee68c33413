"""What a figure must carry to be believed: the machine, the versions, the commit, the arguments, the time."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from headrace.cli.errors import CliError

PACKAGES = ("headrace", "torch", "numpy", "tokenizers", "fastapi", "uvicorn", "pyzmq", "msgspec")


def record(
    command: str, arguments: dict[str, Any], results: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "command": command,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "arguments": arguments,
        "results": results,
    }


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "usable_cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
    }


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of a source checkout, with "+" when files differ from it; "" for an installed wheel."""
    git = ("git", "-C", str(Path(__file__).parent))
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def write_json(path: str, data: Any) -> None:
    try:
        Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CliError(
            f"cannot write {path}: {error.strerror}; name another file with --json"
        ) from None
