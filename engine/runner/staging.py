"""Copies between host and device that nobody waits for: packed, pinned, one copy for many arrays.

Pinned memory is rewritten or dropped only after the copy that used it has finished: with overlap the host prepares
step n+1 while the device may still read step n's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.platforms.device import DeviceRuntime, Event

_ALIGN = 64
_TORCH = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


def packed_size(counts: Sequence[int]) -> int:
    """Bytes that arrays of these element counts (8 bytes an element at most) take when packed."""
    return sum(_aligned(count * 8) for count in counts)


class StagingRing:
    """`depth` pinned buffers used in turn: one upload a step into a device buffer of fixed address."""

    def __init__(self, runtime: DeviceRuntime, nbytes: int, depth: int = 2) -> None:
        self._slices = [
            _Slice(runtime.pinned_empty((nbytes,), torch.uint8), runtime.event())
            for _ in range(depth)
        ]
        # One for all slices: the copy of step n+1 is enqueued behind the kernels of step n.
        self._target = torch.empty(nbytes, dtype=torch.uint8, device=runtime.device)
        self._turn = 0

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """int64, int32 or float32 arrays -> device views of the same shapes and dtypes, valid until the next upload.

        Arrays of equal sizes land at equal addresses, which is what a captured graph needs.
        """
        piece = self._slices[self._turn]
        self._turn = (self._turn + 1) % len(self._slices)
        if piece.used:
            piece.copied.synchronize()
        views = _pack(arrays, piece.memory, self._target)
        piece.copied.record()
        piece.used = True
        return views


class Transfers:
    """Odd copies of a step, each through fresh memory, kept until the step is done."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._kept: list[torch.Tensor] = []

    def send(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """int64, int32 or float32 arrays -> device tensors of the same shapes and dtypes."""
        nbytes = sum(_aligned(array.nbytes) for array in arrays)
        memory = self._runtime.pinned_empty((nbytes,), torch.uint8)
        self._kept.append(memory)
        target = torch.empty(nbytes, dtype=torch.uint8, device=self._runtime.device)
        return _pack(arrays, memory, target)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy to the host; its numbers are there once an event recorded later is complete."""
        host = self._runtime.pinned_empty(tuple(tensor.shape), tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        return host

    def take(self) -> list[torch.Tensor]:
        """What must stay alive until everything sent so far has been copied."""
        kept, self._kept = self._kept, []
        return kept


@dataclass(slots=True)
class _Slice:
    memory: torch.Tensor  # uint8, pinned
    copied: Event
    used: bool = False


def _pack(
    arrays: Sequence[np.ndarray], memory: torch.Tensor, target: torch.Tensor
) -> list[torch.Tensor]:
    host, end = memory.numpy(), 0
    views = []
    for array in arrays:
        stop = end + array.nbytes
        host[end:stop].view(array.dtype)[:] = array.reshape(-1)
        views.append(target[end:stop].view(_TORCH[array.dtype]).view(array.shape))
        end += _aligned(array.nbytes)
    target[:end].copy_(memory[:end], non_blocking=True)
    return views


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
