"""A driver's virtual memory: addresses are reserved once, memory comes and goes beneath them.

So what has an address in it (captured graphs, tensors, pointers of pointers) outlives the memory: `Region`. CUDA and
HIP have the same calls over structs of the same layout, so one table of names tells them apart: `CUDA`, `HIP`. The
libraries are opened at run time; nothing is compiled.

Facts: CUDA driver API, "Virtual Memory Management"; hip_runtime_api.h, "Virtual Memory Management".
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# A region's memory is made of pieces of this size: few enough calls, and a device that is nearly full is filled to
# within one of them while tensors move in. HIP's large allocations are known to fail where pieces do not.
PIECE = 256 << 20

_PINNED, _ON_DEVICE, _READ_WRITE, _OUT_OF_MEMORY = 1, 1, 3, 2  # the same in both libraries


class VmmError(RuntimeError):
    """A call was refused, or there is no library; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Api:
    """The names of one library. `reserve_again`: it gives memory back only once the addresses are given up, too."""

    library: str
    prefix: str
    init: str
    dlpack: int  # DLPack's number of the kind of device
    error_text: Callable[[Any, int], str]
    reserve_again: bool = False


def _cuda_error(library: Any, code: int) -> str:
    text = c_char_p()
    library.cuGetErrorString(code, byref(text))
    return (text.value or b"unknown error").decode()


def _hip_error(library: Any, code: int) -> str:
    library.hipGetErrorString.restype = c_char_p
    return (library.hipGetErrorString(code) or b"unknown error").decode()


CUDA = Api("libcuda.so.1", "cu", "cuInit", 2, _cuda_error)
# HIP keeps the memory of an address range busy until the range is given up (ROCm/hip issue 3781 and others).
HIP = Api("libamdhip64.so", "hip", "hipInit", 10, _hip_error, reserve_again=True)


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp, hipMemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc, hipMemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", c_int)]


_CALLS = {
    "MemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "MemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "MemAddressFree": (c_uint64, c_size_t),
    "MemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64),
    "MemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "MemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
    "MemUnmap": (c_uint64, c_size_t),
    "MemRelease": (c_uint64,),
}


class Driver:
    """The calls for one device. `library` is the opened one, for tests; else the one that this process has loaded or
    the system's. VmmError where there is none or the device has no such memory.
    """

    def __init__(self, api: Api, device: int, library: Any = None) -> None:
        self.api = api
        self.device = device
        self._library = library if library is not None else _open(api.library)
        self._functions = {name: self._function(name, types) for name, types in _CALLS.items()}
        location = _Location(_ON_DEVICE, device)
        self._properties = _Properties(_PINNED, 0, location)
        self._access = _Access(location, _READ_WRITE)
        if code := getattr(self._library, api.init)(0):
            raise VmmError(f"{api.init}: {api.error_text(self._library, code)}")
        size = c_size_t()
        self._call("MemGetAllocationGranularity", byref(size), byref(self._properties), 0)
        self.granularity = size.value

    def _function(self, name: str, types: tuple[Any, ...]) -> Any:
        try:
            function = getattr(self._library, self.api.prefix + name)
        except AttributeError:
            raise VmmError(
                f"{self.api.library} has no {self.api.prefix}{name}: the driver is too old"
            ) from None
        function.argtypes, function.restype = types, c_int
        return function

    def _call(self, name: str, *args: Any) -> None:
        code = self._functions[name](*args)
        if not code:
            return
        text = f"{self.api.prefix}{name}: {self.api.error_text(self._library, code)}"
        if code == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"the device is out of memory ({text})")
        raise VmmError(text)

    def rounded(self, nbytes: int) -> int:
        """The next size that memory comes in."""
        return -(-nbytes // self.granularity) * self.granularity

    def reserve(self, nbytes: int, address: int = 0) -> int:
        """Addresses for `nbytes`, with no memory: anywhere, or exactly there."""
        found = c_uint64()
        self._call("MemAddressReserve", byref(found), nbytes, self.granularity, address, 0)
        if address and found.value != address:
            self.give_up(found.value, nbytes)
            raise VmmError(f"{self.api.prefix}MemAddressReserve: the addresses are taken meanwhile")
        return int(found.value)

    def give_up(self, address: int, nbytes: int) -> None:
        self._call("MemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int) -> int:
        """New memory under reserved addresses -> its handle. torch.OutOfMemoryError; a failure leaves nothing."""
        handle = c_uint64()
        self._call("MemCreate", byref(handle), nbytes, byref(self._properties), 0)
        try:
            self._call("MemMap", address, nbytes, 0, handle, 0)
            try:
                self._call("MemSetAccess", address, nbytes, byref(self._access), 1)
            except Exception:
                self._call("MemUnmap", address, nbytes)
                raise
        except Exception:
            self._call("MemRelease", handle)
            raise
        return int(handle.value)

    def unmap(self, address: int, nbytes: int, handle: int) -> None:
        """Give memory back; nothing may use it any more."""
        self._call("MemUnmap", address, nbytes)
        self._call("MemRelease", handle)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] at these addresses, which it does not own."""
        return tensor_at(address, nbytes, self.api.dlpack, self.device)


class Region:
    """Addresses for `nbytes`, of which the first `mapped` have memory. `memory` is a tensor over all of them.

    Whoever unmaps has waited for the device to be done with it.
    """

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver = driver
        self.nbytes = driver.rounded(nbytes)
        self.address = driver.reserve(self.nbytes)
        self._pieces: list[tuple[int, int, int]] = []  # address, bytes, handle
        self.mapped = 0
        self.memory = driver.tensor(self.address, self.nbytes)

    def grow(self, nbytes: int) -> None:
        """Memory for the first `nbytes` at least. torch.OutOfMemoryError keeps what there was before."""
        before, step = self.mapped, max(self._driver.rounded(PIECE), self._driver.granularity)
        try:
            while self.mapped < nbytes:
                size = min(step, self.nbytes - self.mapped)
                start = self.address + self.mapped
                self._pieces.append((start, size, self._driver.map(start, size)))
                self.mapped += size
        except Exception:
            self._shrink(before)
            self._renew()
            raise

    def drop(self) -> int:
        """Give all memory back and keep the addresses; the bytes given back."""
        dropped = self.mapped
        if dropped:
            self._shrink(0)
            self._renew()
        return dropped

    def _renew(self) -> None:
        """Give addresses without memory up for a moment where the library wants that."""
        if not self.mapped and self._driver.api.reserve_again:
            self._driver.give_up(self.address, self.nbytes)
            self._driver.reserve(self.nbytes, self.address)

    def _shrink(self, nbytes: int) -> None:
        while self.mapped > nbytes:
            address, size, handle = self._pieces.pop()
            self.mapped -= size
            self._driver.unmap(address, size, handle)

    def close(self) -> None:
        """Give back memory and addresses. Nobody has a view of `memory` any more."""
        self._shrink(0)
        self._driver.give_up(self.address, self.nbytes)


def _open(name: str) -> Any:
    """The library of that name which this process has loaded already (torch may bring its own), else the system's."""
    path = name
    maps = Path("/proc/self/maps")
    if maps.exists():
        loaded = (line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines())
        path = next((found for found in loaded if Path(found).name.startswith(name)), name)
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise VmmError(f"{name} cannot be opened ({error})") from error


# A tensor at given addresses comes by way of DLPack: torch asks neither the device nor its caching allocator.


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", POINTER(ctypes.c_int64)),
        ("strides", POINTER(ctypes.c_int64)),
        ("byte_offset", c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", c_void_p), ("deleter", c_void_p)]


_UINT, _CAPSULE = 1, b"dltensor"


def tensor_at(address: int, nbytes: int, device_type: int, device: int) -> torch.Tensor:
    """uint8 [nbytes] over memory that someone else owns. `device_type` is DLPack's number: 1 host, 2 CUDA, 10 ROCm."""
    shape = (ctypes.c_int64 * 1)(nbytes)
    described = _DLManagedTensor(
        _DLTensor(address, device_type, device, 1, _UINT, 8, 1, shape, None, 0), None, None
    )
    # The tensor reads its description once more when it goes, perhaps after Python itself: a few bytes for ever.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(described))
    capsule = _new_capsule()(ctypes.addressof(described), _CAPSULE, None)
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return tensor


@functools.cache
def _new_capsule() -> Any:
    function = ctypes.pythonapi.PyCapsule_New
    function.restype = ctypes.py_object
    function.argtypes = [c_void_p, c_char_p, c_void_p]
    return function
