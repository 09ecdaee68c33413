"""The platform contract: probe, defaults, problems, implementations, open. Torch-free; small on purpose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from headrace.platforms.device import DeviceInfo, DeviceRuntime
from headrace.platforms.registry import Implementation

API_VERSION = 1  # a platform built for another number is refused with text, never half-loaded


@dataclass(frozen=True, slots=True)
class Default:
    """A platform's proposal for one setting (dotted path into EngineConfig) with its reason."""

    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a configuration cannot run (error) or will run worse than expected (warning), with the way out."""

    level: Literal["error", "warning"]
    text: str


def dtype_problems(config: Any, device: DeviceInfo) -> list[Problem]:
    """An error when the dtype that was asked for is none of the device's."""
    dtype = config.model.dtype
    if dtype in ("auto", *device.dtypes):
        return []
    text = f"{device.name} ({device.arch}) does not compute in {dtype}; take one of: "
    return [Problem("error", text + ", ".join(device.dtypes))]


def step_tokens(device: DeviceInfo, large: int = 40) -> Default:
    """Tokens of a step, for accelerators with memory of their own; `large`: GiB from which it is plenty."""
    memory = device.memory / 2**30
    return Default(
        8192 if memory >= large else 2048,
        f"{memory:.0f} GiB leave room for the activations of a step that fills the device",
    )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The few numbers of a model that a platform's defaults may depend on. Torch-free.

    Produced by the engine from its ModelSpec; platforms never see engine types.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    parameters: int  # weights in total
    dtype: str  # dtype stored in the checkpoint
    max_position: int
    experts: int = 0  # of a layer; 0 = none


def mixed_tokens(model: ModelShape) -> Default:
    """Tokens of a step that reads prompts beside decodes, for accelerators."""
    if model.experts:
        return Default(2048, "tokens enough for each expert, and running requests wait little")
    return Default(1024, "products are at full speed here, and running requests wait little")


class Platform(ABC):
    """One family of devices. Subclasses hold no state; everything found by probing is in DeviceInfo."""

    name: ClassVar[str]
    api_version: ClassVar[int] = API_VERSION
    # Higher is preferred when the user names no device and several platforms have one.
    priority: ClassVar[int] = 50
    # True when `probe` loads no vendor library: it may then run in the parent process.
    safe_probe: ClassVar[bool] = False

    @classmethod
    def plausible(cls) -> str | None:
        """None when a device may be here, else the reason why not. Cheap, loads no library."""
        return None

    @classmethod
    @abstractmethod
    def probe(cls) -> list[DeviceInfo]:
        """Devices of this family. Runs in a subprocess unless `safe_probe`; creates no device context."""

    @classmethod
    @abstractmethod
    def describe(cls, arch: str) -> DeviceInfo:
        """A DeviceInfo for hardware that is not here (`explain --device cuda:sm_90`). ValueError names known archs."""

    @classmethod
    def known_archs(cls) -> Sequence[str]:
        return ()

    @abstractmethod
    def worker_env(self, device: DeviceInfo, rank: int, world: int) -> Mapping[str, str]:
        """Environment that must be set before the worker process starts."""

    @abstractmethod
    def defaults(self, model: ModelShape, device: DeviceInfo) -> Mapping[str, Default]: ...

    @abstractmethod
    def check(self, config: Any, device: DeviceInfo) -> Sequence[Problem]: ...

    @abstractmethod
    def implementations(self) -> Iterable[Implementation]:
        """Metadata only: nothing heavy is imported."""

    @abstractmethod
    def open(self, device: DeviceInfo) -> DeviceRuntime:
        """Create the device context; called once, in the worker."""
