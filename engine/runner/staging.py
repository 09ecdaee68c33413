"""Copies between host and device that nobody waits for: packed, pinned, one copy for many arrays.

Pinned memory is rewritten or dropped only after the copy that used it has finished: with overlap the host prepares
step n+1 while the device may still read step n's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.platforms.device import DeviceRuntime, Event

_ALIGN = 64
# Pinned memory that is made ready: so many pieces of each power of two of bytes.
_SMALLEST, _LARGEST, _READY = 2, 21, 6
_TORCH = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}

Shape = tuple[tuple[int, ...], torch.dtype]


def packed_size(counts: Sequence[int]) -> int:
    """Bytes that arrays of these element counts (8 bytes an element at most) take when packed."""
    return sum(_aligned(count * 8) for count in counts)


@dataclass(frozen=True, slots=True)
class FixedUpload:
    """Arrays whose places are known beforehand: on the device, and on the host in each buffer of a ring."""

    device: list[torch.Tensor]
    host: list[list[np.ndarray]]
    copies: list[tuple[torch.Tensor, torch.Tensor]]  # to, from


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
        piece = self._slices[self.begin()]
        views = _pack(arrays, piece.memory, self._target)
        piece.copied.record()
        return views

    def fixed(self, *shapes: Shape) -> FixedUpload:
        """For uploads of such arrays, again and again: `begin`, write into `host` of that buffer, `send`."""
        device, end = _views(self._target, shapes)
        host = [[v.numpy() for v in _views(one.memory, shapes)[0]] for one in self._slices]
        copies = [(self._target[:end], one.memory[:end]) for one in self._slices]
        return FixedUpload(device, host, copies)

    def begin(self) -> int:
        """The buffer whose turn it is, free to be written."""
        turn = self._turn
        self._turn = (turn + 1) % len(self._slices)
        if self._slices[turn].used:
            self._slices[turn].copied.synchronize()
        self._slices[turn].used = True
        return turn

    def send(self, upload: FixedUpload, turn: int) -> None:
        target, memory = upload.copies[turn]
        target.copy_(memory, non_blocking=True)
        self._slices[turn].copied.record()


class Transfers:
    """Odd copies of a step, each through fresh memory, kept until the step is done."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._kept: list[torch.Tensor] = []
        # Pinned memory that was never used before is had from the driver, which may wait for all that the device has
        # to do. What is let go of here is used again for whatever needs as much.
        sizes = (1 << power for power in range(_SMALLEST, _LARGEST + 1) for _ in range(_READY))
        _ = [runtime.pinned_empty((nbytes,), torch.uint8) for nbytes in sizes]

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


def _views(memory: torch.Tensor, shapes: Sequence[Shape]) -> tuple[list[torch.Tensor], int]:
    """Packed one behind the other, and where the last one ends."""
    views, end = [], 0
    for shape, dtype in shapes:
        nbytes = math.prod(shape) * dtype.itemsize
        views.append(memory[end : end + nbytes].view(dtype).view(shape))
        end += _aligned(nbytes)
    return views, end


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
