"""Executor: how the engine drives its workers. Torch-free; implementations live in engine/workers/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from headrace.engine.core.step import StepPlan, StepResult
from headrace.platforms.kv_layout import KVFormat, KVPlan, KVSpec

# (phase, done, total, text): phases "open", "load", "measure", "kv", "warm-up"; total 0 = unknown
Progress = Callable[[str, float, float, str], None]


class WorkerInfo(msgspec.Struct):
    """What rank 0 knows after `load`."""

    device: str
    dtype: str
    weight_bytes: int  # on this rank
    kv_specs: list[KVSpec]  # one a layer
    kv_formats: list[list[KVFormat]]  # one list a layer, from the chosen attention implementation
    free_memory: int  # bytes left for KV after weights and activations: the minimum over ranks
    activation_bytes: int
    vocab: int
    selection: list[dict[str, Any]]  # the SelectionReport as plain data
    notes: list[str] = []  # for the start-up panel
    graphs: int = 0  # that will be captured while the engine runs


class WorkerFailed(RuntimeError):
    """A worker died or a phase failed; the text says which, why, and the way out."""


class Executor(Protocol):
    """FIFO of steps over N workers. All methods are called from the engine thread."""

    depth: int  # steps that may be in flight; 1 without overlap

    def start(self, progress: Progress) -> WorkerInfo:
        """Open devices, select, load weights, measure. Raises WorkerFailed."""

    def init_kv(self, plan: KVPlan, progress: Progress) -> None:
        """Allocate the caches, warm up, capture graphs."""

    def submit(self, plan: StepPlan) -> None:
        """Enqueue; does not wait."""

    def poll(self, timeout: float) -> StepResult | None:
        """Next result in submission order, or None after `timeout` seconds. Raises WorkerFailed."""

    def fileno(self) -> int:
        """Readable when a result may be waiting, so that one poll covers requests and results."""

    def call(self, method: str, *args: Any) -> Any:
        """Run a worker utility on every rank between steps; rank 0's answer ("selection", "profile", ...)."""

    def close(self) -> None: ...
