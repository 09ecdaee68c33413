"""What NVIDIA's driver says of its devices, by ctypes: no torch, no context. And what each architecture can do."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path

from headrace.platforms.torch_device.installed import torch_built_for
from headrace.platforms.torch_device.installed import version_of as version_of

GIB = 1 << 30

_UNITS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
_MINOR = 76

# arch -> a typical device of it: name, GiB, multiprocessors. For `--device cuda:<arch>` on a machine without one.
DESCRIBED = {
    "sm_75": ("a Turing GPU such as the T4", 16, 40),
    "sm_80": ("an Ampere GPU such as the A100", 80, 108),
    "sm_86": ("an Ampere GPU such as the RTX 3090", 24, 82),
    "sm_89": ("an Ada GPU such as the L40S", 48, 142),
    "sm_90": ("a Hopper GPU such as the H100", 80, 132),
    "sm_100": ("a Blackwell GPU such as the B200", 180, 148),
    "sm_120": ("a Blackwell GPU such as the RTX 5090", 32, 170),
}


@dataclass(frozen=True, slots=True)
class Found:
    """One device as the driver sees it, in the order in which torch numbers them."""

    name: str
    arch: str
    memory: int  # bytes
    units: int


class DriverError(RuntimeError):
    """The driver's library is missing or refuses; the text says why."""


def arch_of(major: int, minor: int) -> str:
    return f"sm_{major}{minor}"


def capability(arch: str) -> int:
    """90 for "sm_90"."""
    return int(arch.removeprefix("sm_"))


def features_of(arch: str) -> frozenset[str]:
    """What kernels may ask for. "pdl": a kernel may start before the one that it depends on has ended."""
    level = capability(arch)
    known = {"bf16": 80, "async_copy": 80, "fp8": 89, "pdl": 90}
    found = {name for name, least in known.items() if level >= least}
    if level // 10 in (9, 10):
        found.add("tma")
    return frozenset(found)


def dtypes_of(arch: str) -> tuple[str, ...]:
    if capability(arch) >= 80:
        return ("bfloat16", "float16", "float32")
    return ("float16", "float32")


def device_files() -> str | None:
    """None when the system shows an NVIDIA device, else the reason why there is none."""
    if sys.platform == "win32":
        return None  # there are no device files to look at: the driver's library will say
    if not sys.platform.startswith("linux"):
        return "NVIDIA devices are driven on Linux and Windows only"
    if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists():
        return None
    return "no NVIDIA device here (/dev/nvidia0)"


def _driver() -> ctypes.CDLL:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise DriverError(f"the NVIDIA driver's library cannot be loaded: {error}") from error


def devices() -> tuple[list[Found], str]:
    """All devices that CUDA_VISIBLE_DEVICES leaves, and the driver's CUDA version. DriverError with the reason."""
    library = _driver()

    def call(function: str, *arguments: object) -> None:
        code = getattr(library, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            library.cuGetErrorString(code, ctypes.byref(text))
            said = (text.value or b"unknown error").decode()
            raise DriverError(f"{function} says: {said} ({code})")

    call("cuInit", 0)
    number = ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(number))
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    call("cuDeviceGetCount", ctypes.byref(number))
    found = []
    for index in range(number.value):
        device = ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(device), index)
        name = ctypes.create_string_buffer(128)
        call("cuDeviceGetName", name, len(name), device)
        memory = ctypes.c_size_t()
        call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        values = []
        for attribute in (_MAJOR, _MINOR, _UNITS):
            value = ctypes.c_int()
            call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
            values.append(value.value)
        arch = arch_of(values[0], values[1])
        found.append(Found(name.value.decode(), arch, memory.value, values[2]))
    return found, version


def torch_cuda() -> str:
    """The CUDA version that the installed torch was built for, "" without."""
    return torch_built_for("cuda")
