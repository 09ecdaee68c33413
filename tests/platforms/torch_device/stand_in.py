"""The compiled stand-in for a driver's virtual memory (virtual_memory.c), and one for torch's device module."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from headrace.platforms.torch_device.vmm import HIP, Api, Driver

DEVICE = 3
GRAIN = 1 << 16


def build(api: Api, folder: Path) -> Path:
    """A library of its own for each folder: nobody else counts in it."""
    path = folder / f"{api.prefix}.so"
    path.write_bytes(_compiled(api))
    return path


@functools.cache
def _compiled(api: Api) -> bytes:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    flags = ["-DPREFIX=hip", "-DHIP"] if api is HIP else []
    source = Path(__file__).with_name("virtual_memory.c")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "library.so")
        subprocess.run([compiler, "-shared", "-fPIC", *flags, source, "-o", made], check=True)
        return made.read_bytes()


class StandIn:
    """The library of one API: what was called, what is held, what is to fail."""

    def __init__(self, path: Path, api: Api) -> None:
        self.library = ctypes.CDLL(str(path))
        self.api = dataclasses.replace(api, dlpack=1)  # its memory is the host's
        self.library.vmm_log.restype = ctypes.c_char_p
        self.library.vmm_count.restype = ctypes.c_uint64

    def driver(self) -> Driver:
        return Driver(self.api, DEVICE, self.library)

    def log(self) -> str:
        """The calls since the last time."""
        text: str = self.library.vmm_log().decode().strip()
        self.library.vmm_clear()
        return text

    def fail(self, name: str, countdown: int = 1) -> None:
        self.library.vmm_fail(name.encode(), countdown)

    @property
    def used(self) -> int:
        return ctypes.c_uint64.in_dll(self.library, "vmm_used").value

    def limit(self, nbytes: int) -> None:
        ctypes.c_uint64.in_dll(self.library, "vmm_limit").value = nbytes

    def held(self) -> dict[str, int]:
        kinds = ("reserved", "mapped", "handles")
        return {what: self.library.vmm_count(what.encode()) for what in kinds}


class Module:
    """In place of torch.cuda: says in `log` what was asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def synchronize(self, _: object) -> None:
        self.log.append("synchronize")

    def empty_cache(self) -> None:
        self.log.append("empty_cache")
