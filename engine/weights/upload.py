"""Bytes of files to a device: read into pinned pieces by many threads, copied while the next pieces are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.weights.source import ModelError
from headrace.platforms.device import DeviceRuntime, Event

# Large enough for storage and bus at full speed; all pieces together are what a load pins.
PIECE = 16 << 20
PIECES = 12

# (first byte, memory): writes the bytes from there on
Fill = Callable[[int, NDArray[np.uint8]], None]


@dataclass(slots=True)
class _Piece:
    memory: torch.Tensor  # uint8, pinned
    copied: Event
    used: bool = False


class Uploader:
    """A ring of pinned pieces that the threads of a load share: each thread reads, the device copies behind it.

    Copies are enqueued on the current stream, so whatever follows there sees the bytes; nobody waits for them but the
    next user of a piece.
    """

    def __init__(self, runtime: DeviceRuntime, piece: int = PIECE, pieces: int = PIECES):
        self.device = runtime.device
        self.piece = piece
        self._runtime = runtime
        self._left = pieces  # to be made when they are needed: a small model needs few
        self._free: SimpleQueue[_Piece] = SimpleQueue()
        self._lock = Lock()
        self._files: dict[str, int] = {}

    def send(self, target: torch.Tensor, fill: Fill, unit: int = 1) -> None:
        """`target`: uint8 [n] on the device. `fill` is asked for the bytes in order, whole units of them at a time."""
        step = max(self.piece // unit, 1) * unit
        if step > self.piece:
            raise ValueError(f"units of {unit} bytes do not fit pieces of {self.piece}")
        for start in range(0, len(target), step):
            part = target[start : start + step]
            piece = self._take()
            try:
                memory = piece.memory[: len(part)]
                fill(start, memory.numpy())
                part.copy_(memory, non_blocking=True)
                piece.copied.record()
                piece.used = True
            finally:
                self._free.put(piece)

    def from_file(self, path: str, offset: int) -> Fill:
        """Bytes of a file from `offset` on, read without mapping them. ModelError when the file ends too early."""
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
        file = self._files[path]

        def fill(start: int, memory: NDArray[np.uint8]) -> None:
            done = 0
            while done < len(memory):
                count = os.preadv(file, [memory[done:].data], offset + start + done)
                if not count:
                    raise ModelError(f"{path} has become shorter while it was read; load it again")
                done += count

        return fill

    def close(self) -> None:
        """Waits for the copies: pinned memory must outlive them."""
        self._runtime.synchronize()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _take(self) -> _Piece:
        with self._lock:
            make = self._left > 0 and self._free.empty()
            self._left -= make
        if make:
            pinned = self._runtime.pinned_empty((self.piece,), torch.uint8)
            return _Piece(pinned, self._runtime.event())
        piece = self._free.get()
        if piece.used:
            piece.copied.synchronize()
        return piece
