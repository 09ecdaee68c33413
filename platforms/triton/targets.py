"""What kernels are compiled for, and what the compiler says of them. For compile_all.py: no device is needed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from headrace.platforms.device import DeviceInfo
from headrace.platforms.probe import describe_device
from headrace.platforms.registry import load_target

KIB = 1024
# KiB of shared memory that one program may have
_SHARED = {
    "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99,
    "gfx90a": 64, "gfx942": 64, "gfx950": 160, "gfx1100": 64, "gfx1201": 64,
}  # fmt: skip
ARCHS = tuple(_SHARED)
# Bytes that a variant may spill. On NVIDIA's devices prompts with heads of 256 spill up to 100 (on sm_100 300) and are
# faster even so: twice as fast on an H200 as half the tile without a spill. Where matrix units have no float32, a
# thread holds whole rows of both operands: heads of 256 do not fit its 256 registers.
MOST_SPILLS, MOST_SPILLS_EXACT = 320, 512
CACHES = ("k_cache", "v_cache")
# where a platform changes launch options, by the start of its architectures' names; the others keep them as they are
_CHANGES = {
    "gfx": "headrace.platforms.rocm.tuning:kernel_options",
    "sm_": "headrace.platforms.cuda.tuning:kernel_options",
}

Change = Callable[[frozenset[str], str, Any, Mapping[str, Any]], Mapping[str, Any]]


class Described:
    """As much of a runtime as the makers of launch options look at."""

    tuned: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, info: DeviceInfo, change: Change | None) -> None:
        self.info = info
        self._change = change

    def kernel_options(
        self, kernel: str, query: Any, options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return self._change(self.info.features, kernel, query, options) if self._change else {}


@dataclass(frozen=True, slots=True)
class Resources:
    registers: int
    spills: int  # bytes of a thread
    shared: int  # bytes
    missing: str = ""  # instructions that ought to be there


@dataclass(frozen=True, slots=True)
class Target:
    compiler: GPUTarget
    shared: int  # bytes
    most_spills: int  # bytes of a thread
    runtime: Described

    def facts(self, name: str, kind: str) -> list[list[Any]]:
        """What launches say of an argument: sizes and addresses are multiples of 16 and, where the compiler asks for
        it, memory is at most 2 GiB; a cache is more."""
        small = self.compiler.backend == "hip" and kind.startswith("*") and name not in CACHES
        return [["tt.divisibility", 16], *([["tt.pointer_range", 32]] if small else [])]

    def resources(self, made: Any) -> Resources:
        """What a compiled kernel takes."""
        if self.compiler.backend == "hip":
            return _of_amdgcn(made, self.runtime.info.features)
        registers, spills = _assembled(made.asm["ptx"])
        return Resources(registers, spills, made.metadata.shared)


def target(arch: str) -> Target:
    """One of ARCHS. ValueError or PlatformError when no platform here knows it."""
    if arch not in _SHARED:
        raise ValueError(f"no architecture {arch!r} to compile for; known: {', '.join(ARCHS)}")
    if arch.startswith("sm_"):
        info = describe_device(f"cuda:{arch}").device
        compiler = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    else:
        info = describe_device(f"rocm:{arch}").device
        compiler = GPUTarget("hip", arch, 64 if "wave64" in info.features else 32)
    names = (name for start, name in _CHANGES.items() if arch.startswith(start))
    change = next((load_target(name) for name in names), None)
    most = MOST_SPILLS_EXACT if "wmma" in info.features else MOST_SPILLS
    return Target(compiler, _SHARED[arch] * KIB, most, Described(info, change))


def _assembled(ptx: str) -> tuple[int, int]:
    """Registers a thread, and bytes spilled, as NVIDIA's assembler reports them."""
    target = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert target is not None
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    assembler = folder / ("ptxas-blackwell" if target[1].startswith("sm_1") else "ptxas")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "kernel.ptx")
        source.write_text(ptx)
        command = [str(assembler), "-v", f"-arch={target[1]}", str(source), "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores", said)
    return int(registers[1]) if registers else 0, int(spills[1]) if spills else 0


def _of_amdgcn(made: Any, features: frozenset[str]) -> Resources:
    """From the kernel's own metadata in the assembly, and the matrix instructions that its products should be."""
    text = made.asm["amdgcn"]

    def count(name: str) -> int:
        match = re.search(rf"^\s*\.{name}:\s+(\d+)", text, re.MULTILINE)
        return int(match[1]) if match else 0

    missing = ""
    dots = re.findall(r"tt\.dot .*?: tensor<\S*x(\w+)> \*", made.asm["ttir"])
    if dots:
        kind = next((kind for kind in ("mfma", "wmma") if kind in features), "")
        exact = "f32" in dots and kind == "wmma"  # has no products of float32
        if kind and not exact and f"v_{kind}_" not in text:
            missing = f"v_{kind}"
    registers = count("vgpr_count") + count("agpr_count") * ("mfma" not in features)
    return Resources(registers, 4 * count("vgpr_spill_count"), made.metadata.shared, missing)
