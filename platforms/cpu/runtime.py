"""The CPU opened in a worker: no streams, so everything is complete when a call returns."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.platforms.allocator import DeviceAllocator
from headrace.platforms.cpu.builds import FEATURE
from headrace.platforms.cpu.hardware import Hardware
from headrace.platforms.cpu.numa import Placement
from headrace.platforms.cpu.pages import MADVISE, PagesAhead
from headrace.platforms.device import DeviceInfo, DeviceRuntime, Event, MemoryInfo
from headrace.platforms.graph import EagerGraphs, GraphBackend

if TYPE_CHECKING:
    from headrace.platforms.cpu.kernels import Kernels


class _Done(Event):
    """There is no stream to wait for."""

    def record(self, stream: Any = None) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


class CpuAllocator(DeviceAllocator):
    """Zeroed pages straight from the kernel: they take memory only when they are written, or shortly before."""

    def __init__(self, pages: PagesAhead | None = None) -> None:
        self._held: dict[str, list[torch.Tensor]] = {}
        self.pages = pages or PagesAhead()

    def reserve(self, nbytes: int, tag: str) -> torch.Tensor:
        # numpy asks the C library for zeroed memory, which for large sizes means untouched pages;
        # torch.zeros would write them, torch.empty may hand out recycled memory with NaN in it.
        pages = np.zeros(nbytes, np.uint8)
        Placement.here().spread(pages)
        memory = torch.from_numpy(pages)
        self._held.setdefault(tag, []).append(memory)
        self.pages.watch(memory)
        return memory

    def free(self, tag: str) -> None:
        for memory in self._held.pop(tag, []):
            self.pages.forget(memory)

    def stays_awake(self, tag: str) -> str:
        if tag not in self._held:  # never reserved here: weights
            return "they are in the host's memory, which is this device's"
        return "" if MADVISE else "this system does not take pages back"

    def sleep(self, tag: str, keep: bool) -> int:
        """`keep` changes nothing: memory that is wanted again stays awake here."""
        if keep:
            return 0
        parts = self._held.get(tag, [])
        for part in parts:
            self.pages.forget(part)
        return sum(_give_back(part) for part in parts)

    def wake(self, tag: str) -> None:
        """Pages come back as zeros when they are touched."""
        for part in self._held.get(tag, []):
            self.pages.watch(part)

    def stats(self) -> dict[str, int]:
        return {tag: sum(part.numel() for part in parts) for tag, parts in self._held.items()}


def _give_back(memory: torch.Tensor) -> int:
    """Return the whole pages within `memory` to the system; all of it is zeros then. The bytes of those pages."""
    start, stop = memory.data_ptr(), memory.data_ptr() + memory.numel()
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= last or MADVISE(first, last - first, mmap.MADV_DONTNEED):
        memory.zero_()
        return 0
    memory[: first - start].zero_()
    memory[last - start :].zero_()
    return last - first


class CpuRuntime(DeviceRuntime):
    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.device = torch.device("cpu")
        self._hardware = Hardware()
        self.pages = PagesAhead()
        self._allocator = CpuAllocator(self.pages)
        self._kernels: Kernels | None = None
        self._graphs: GraphBackend | None = None
        self._threads_before = torch.get_num_threads()
        # worker_env sets it before a worker process starts; a worker inside the engine process gets it here
        asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        torch.set_num_threads(min(int(asked), info.units) if asked.isdigit() else info.units)

    def stream(self) -> None:
        return None

    def use_stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def event(self) -> Event:
        return _Done()

    def synchronize(self) -> None:
        return None

    def memory(self) -> MemoryInfo:
        return MemoryInfo(self._hardware.free_memory().value, self._hardware.total_memory().value)

    def reset_peak_memory(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        except OSError:
            return None  # the peak then covers the process's whole life, which is only larger

    def peak_memory(self) -> int:
        """Resident bytes of the process at its highest: on a CPU the process is the device."""
        try:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except (OSError, ValueError, IndexError):
            pass
        try:
            import resource
        except ImportError:
            return 0
        scale = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def kernels(self) -> Kernels:
        """The native library with as many threads as PyTorch has. OSError when there is no build for this CPU."""
        if self._kernels is None:
            from headrace.platforms.cpu.kernels import Kernels

            self._kernels = Kernels(self.info.features, torch.get_num_threads())
        return self._kernels

    def graphs(self) -> GraphBackend:
        """Tapes of native calls; without the native library there is nothing to record."""
        if self._graphs is None:
            self._graphs = EagerGraphs()
            if FEATURE in self.info.features:
                from headrace.platforms.cpu.tape import TapeGraphs

                # A library that does not load has lost every selection already, with the reason in the table.
                with suppress(OSError):
                    self._graphs = TapeGraphs(self.kernels())
        return self._graphs

    def read_bandwidth(self) -> float:
        return self.kernels().read_bandwidth() if FEATURE in self.info.features else 0.0

    @contextmanager
    def packed_weights(self, path: Path, identity: str) -> Iterator[None]:
        if FEATURE not in self.info.features:
            raise ValueError(
                "without the native kernels nothing is packed; leave --packed-cache out (see `headrace doctor`)"
            )
        kernels = self.kernels()
        kernels.store = store = kernels.packed_weights(path, identity)
        try:
            yield
            store.save()
        finally:
            kernels.store = None

    def allocator(self) -> DeviceAllocator:
        return self._allocator

    def close(self) -> None:
        self.pages.close()
        self._allocator = CpuAllocator()
        torch.set_num_threads(self._threads_before)
