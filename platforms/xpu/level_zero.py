"""Level Zero by ctypes: the devices that its drivers show, in the order in which torch numbers them.

Structures, codes and flags are those of ze_api.h of Level Zero 1.8, which later releases only add to.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.platforms.xpu.hardware import INTEL

_DRIVER_PROPERTIES, _DEVICE_PROPERTIES, _MEMORY_PROPERTIES = 0x1, 0x3, 0x7
_GPU = 1
_INTEGRATED = 1
_CODES = {
    0x70000001: "the device was lost",
    0x70000003: "out of device memory",
    0x70010000: "no permission",
    0x78000001: "no driver for Level Zero is installed",
    0x78000003: "unsupported version",
}
HOW = "install Intel's compute driver and Level Zero (on Ubuntu: libze1 and libze-intel-gpu1)"


class LevelZeroError(RuntimeError):
    """The loader is missing or a call failed; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Found:
    """One device as the driver sees it."""

    name: str
    device_id: int
    memory: int  # bytes
    units: int  # Xe cores
    integrated: bool


class _Driver(ctypes.Structure):
    _fields_ = [
        ("stype", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("uuid", ctypes.c_uint8 * 16),
        ("version", ctypes.c_uint32),
    ]


class _Device(ctypes.Structure):
    _fields_ = [
        ("stype", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("type", ctypes.c_uint32),
        ("vendor", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("subdevice", ctypes.c_uint32),
        ("clock", ctypes.c_uint32),
        ("largest", ctypes.c_uint64),
        ("contexts", ctypes.c_uint32),
        ("priority", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("width", ctypes.c_uint32),
        ("engines", ctypes.c_uint32),
        ("subslices", ctypes.c_uint32),
        ("slices", ctypes.c_uint32),
        ("resolution", ctypes.c_uint64),
        ("timestamp", ctypes.c_uint32),
        ("kernel_timestamp", ctypes.c_uint32),
        ("uuid", ctypes.c_uint8 * 16),
        ("name", ctypes.c_char * 256),
    ]


class _Memory(ctypes.Structure):
    _fields_ = [
        ("stype", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("clock", ctypes.c_uint32),
        ("width", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("name", ctypes.c_char * 256),
    ]


def _loaders() -> Sequence[str]:
    """The system's loader, then the one that torch's own packages for XPU may bring."""
    if sys.platform == "win32":
        return ("ze_loader.dll",)
    return ("libze_loader.so.1", str(Path(sys.prefix) / "lib" / "libze_loader.so.1"))


def _load(names: Sequence[str]) -> ctypes.CDLL:
    why = ""
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            why = why or str(error)
    raise LevelZeroError(f"Level Zero's loader cannot be loaded ({why}); {HOW}")


class LevelZero:
    """The loader, initialised. Handles are opaque; nothing here makes a context."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._library = _load(names or _loaders())
        self._call("zeInit", ctypes.c_uint32(0))

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments) & 0xFFFFFFFF
        if code:
            what = _CODES.get(code, "an error")
            raise LevelZeroError(f"{function} says: {what} ({code:#x}); {HOW}")

    def _handles(self, function: str, *first: object) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint32()
        self._call(function, *first, ctypes.byref(count), None)
        handles = (ctypes.c_void_p * count.value)()
        if count.value:
            self._call(function, *first, ctypes.byref(count), handles)
        return [ctypes.c_void_p(handle) for handle in handles]

    def devices(self) -> tuple[list[Found], str]:
        """Intel's GPUs and the version of their driver. As torch does: integrated ones only without a discrete one."""
        found: list[Found] = []
        version = ""
        for driver in self._handles("zeDriverGet"):
            here = [
                device
                for handle in self._handles("zeDeviceGet", driver)
                if (device := self._device(handle)) is not None
            ]
            if here and not version:
                version = self._version(driver)
            found += here
        discrete = [device for device in found if not device.integrated]
        return discrete or found, version

    def _version(self, driver: ctypes.c_void_p) -> str:
        facts = _Driver(stype=_DRIVER_PROPERTIES)
        self._call("zeDriverGetProperties", driver, ctypes.byref(facts))
        major, minor, build = (
            facts.version >> 24,
            facts.version >> 16 & 0xFF,
            facts.version & 0xFFFF,
        )
        return f"{major}.{minor}.{build}"

    def _device(self, handle: ctypes.c_void_p) -> Found | None:
        facts = _Device(stype=_DEVICE_PROPERTIES)
        self._call("zeDeviceGetProperties", handle, ctypes.byref(facts))
        if facts.type != _GPU or facts.vendor != INTEL:
            return None
        return Found(
            facts.name.decode(errors="replace"),
            facts.device,
            self._memory(handle),
            facts.slices * facts.subslices,
            bool(facts.flags & _INTEGRATED),
        )

    def _memory(self, handle: ctypes.c_void_p) -> int:
        count = ctypes.c_uint32()
        self._call("zeDeviceGetMemoryProperties", handle, ctypes.byref(count), None)
        memories = (_Memory * count.value)(
            *(_Memory(stype=_MEMORY_PROPERTIES) for _ in range(count.value))
        )
        if count.value:
            self._call("zeDeviceGetMemoryProperties", handle, ctypes.byref(count), memories)
        return sum(memory.total for memory in memories)
