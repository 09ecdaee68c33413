"""What a device is: plain data found once in the parent (DeviceInfo), a live handle in the worker (DeviceRuntime)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from headrace.platforms.allocator import DeviceAllocator
    from headrace.platforms.graph import GraphBackend


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device as plain data: picklable, JSON-able, describable for hardware that is not here.

    `arch` is the vendor's own short name ("avx512_bf16", "sm_90", "gfx942", "910B"). Code never
    branches on `platform` or `arch` names outside `platforms/<name>/`; it asks for `features`.
    """

    platform: str
    index: int
    name: str
    arch: str
    features: frozenset[str] = frozenset()
    memory: int = 0  # bytes the device has; for a CPU the smaller of RAM and cgroup limit
    units: int = 1  # SMs, CUs, cores: physical cores within affinity and cgroup on a CPU
    dtypes: tuple[str, ...] = ("float32",)  # compute dtypes, the preferred one first
    versions: Mapping[str, str] = field(default_factory=dict)  # driver, runtime, libraries
    notes: tuple[str, ...] = ()  # what probing found worth telling a person

    @property
    def spec(self) -> str:
        """The name a user may pass to --device, e.g. "cuda:0"."""
        return f"{self.platform}:{self.index}"


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Device memory in bytes as seen by this process right now."""

    free: int
    total: int


class Event(ABC):
    """A point in a stream. On devices without streams it is complete at once."""

    @abstractmethod
    def record(self, stream: Any = None) -> None: ...

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def query(self) -> bool: ...


class DeviceRuntime(ABC):
    """A device opened in a worker process: the only way shared code touches streams, memory and graphs."""

    info: DeviceInfo
    device: torch.device
    # launch options and implementations that were measured on this device, by platforms.tuned.key
    tuned: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

    @abstractmethod
    def stream(self) -> Any:
        """A new stream, or None on devices without streams."""

    @abstractmethod
    def use_stream(self, stream: Any) -> AbstractContextManager[None]: ...

    @abstractmethod
    def event(self) -> Event: ...

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def memory(self) -> MemoryInfo: ...

    @abstractmethod
    def reset_peak_memory(self) -> None: ...

    @abstractmethod
    def peak_memory(self) -> int:
        """Bytes of the highest allocation since `reset_peak_memory`; 0 where it cannot be known."""

    @abstractmethod
    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory the device can copy from asynchronously; ordinary memory where that has no meaning."""

    @abstractmethod
    def seed(self, value: int) -> None: ...

    @abstractmethod
    def graphs(self) -> GraphBackend: ...

    @abstractmethod
    def allocator(self) -> DeviceAllocator: ...

    def enter_thread(self) -> None:
        """Called by every other thread that is to enqueue work, before it does: where each has a current device."""
        return None

    def compile_ahead(self, body: Callable[[], None]) -> None:
        """Compile what `body` would launch, side by side, on devices whose kernels are compiled when they are first
        launched. `body` is run at most once, and what it computes there is not to be used."""
        return None

    def read_bandwidth(self) -> float:
        """Bytes a second that all units together read from memory, measured now; 0 = not known."""
        return 0.0

    def profiler_activity(self) -> Any:
        """torch.profiler's activity that records this device's kernels; None where it knows none."""
        return None

    def kernel_options(
        self, kernel: str, query: Any, options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """What this device wants changed in the launch `options` (constants, warps, stages) of a shared kernel, by
        the kernel's name and the query it serves; {} keeps them all."""
        return {}

    def packed_weights(self, path: Path, identity: str) -> AbstractContextManager[None]:
        """While it is open, `pack_named` takes matrices from the file `path` if it was made for `identity`; at the end
        what it lacks is written there. ValueError where packed weights cannot be kept."""
        raise ValueError(f"{self.info.spec} keeps no packed weights; leave --packed-cache out")

    @abstractmethod
    def close(self) -> None: ...
