"""Weights made up from a config.json alone (`load_format: dummy`): to try sizes and speed without a download."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.layout import tensor_shapes
from headrace.engine.weights.mapped_tensor import no_blocks
from headrace.engine.weights.source import ModelFiles, TensorHandle

if TYPE_CHECKING:
    import numpy as np

_SPREAD = 0.02
# Random numbers are drawn once; a tensor is a walk round them from a place of its own. A prime, so that rows differ.
_PERIOD = 1_048_573
_TURNS = 8  # a copy takes up to one turn less at a time


class _Numbers:
    """The numbers, so many turns of them that long pieces are one copy, on a device, in each dtype asked for."""

    def __init__(self, device: torch.device):
        self.device = device
        self._made: dict[torch.dtype, torch.Tensor] = {}
        self._lock = threading.Lock()

    def of(self, dtype: torch.dtype) -> torch.Tensor:
        with self._lock:
            if dtype not in self._made:
                generator = torch.Generator().manual_seed(0)
                turn = torch.randn(_PERIOD, generator=generator).mul_(_SPREAD)
                self._made[dtype] = turn.to(self.device, dtype).repeat(_TURNS)
            return self._made[dtype]


class DummyHandle(TensorHandle):
    """Small normal values that depend on the name alone: the same in every process, for every shard and device.

    They are spread out where they are wanted: made on the host, 16 GB of them would take longer than real weights.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], scheme: str, center: float, numbers: _Numbers
    ):
        self.name, self.shape, self.scheme = name, shape, scheme
        self._center, self._numbers = center, numbers

    def read(
        self, dtype: torch.dtype, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        """On the source's device."""
        shape = [*self.shape]
        for axis, part in enumerate((rows, cols)):
            if part is not None:
                shape[axis] = len(range(*part.indices(shape[axis])))
        out = torch.empty(shape, dtype=dtype, device=self._numbers.device)
        self.read_into(out, rows, cols)
        return out

    def read_into(
        self, out: torch.Tensor, rows: slice | None = None, cols: slice | None = None
    ) -> None:
        numbers = self._numbers.of(out.dtype)
        width = math.prod(self.shape[1:])
        first, stop, _ = (rows or slice(None)).indices(self.shape[0])
        begin, end, _ = (cols or slice(None)).indices(width)
        matrix = out.view(stop - first, end - begin)
        place = zlib.crc32(self.name.encode()) + first * width
        step = max(1, (_TURNS - 1) * _PERIOD // width)  # rows
        for low in range(0, len(matrix), step):
            part = matrix[low : low + step]
            start = (place + low * width) % _PERIOD
            values = numbers[start : start + len(part) * width].view(len(part), width)
            part.copy_(values[:, begin:end])
        if self._center:
            out.add_(self._center)

    def blocks(self, rows: slice | None = None) -> np.ndarray:
        raise no_blocks(self.name, self.scheme)


class DummySource:
    """See WeightSource. Its tensors are made on `device`."""

    def __init__(self, files: ModelFiles, spec: ModelSpec, device: torch.device | None = None):
        self.files, self.spec = files, spec
        self._numbers = _Numbers(device or torch.device("cpu"))
        self._shapes = tensor_shapes(spec)

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def get(self, name: str) -> DummyHandle:
        shape = self._shapes[name]
        # A norm multiplies by (offset + w), which is to be near one.
        center = 1.0 - self.spec.norm_offset if name.endswith("norm.weight") else 0.0
        return DummyHandle(name, shape, self.spec.dtype, center, self._numbers)

    def total_bytes(self) -> int:
        size = 4 if self.spec.dtype == "float32" else 2
        return sum(math.prod(shape) for shape in self._shapes.values()) * size

    def close(self) -> None:
        """Nothing is open."""
