"""Weights made up from a config.json alone (`load_format: dummy`): to try sizes and speed without a download."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.layout import tensor_shapes
from headrace.engine.weights.mapped_tensor import no_blocks
from headrace.engine.weights.source import ModelFiles

if TYPE_CHECKING:
    import numpy as np

_SPREAD = 0.02
# Random numbers are drawn once for each tensor and repeated; a prime, so that rows differ.
_PERIOD = 65521


class DummyHandle:
    """Small normal values that depend on the name alone: the same in every process, for every shard and device.

    They are spread out where they are wanted: made on the host, 16 GB of them would take longer than real weights.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], scheme: str, center: float, device: torch.device
    ):
        self.name, self.shape, self.scheme = name, shape, scheme
        self._center, self._device = center, device

    def read(
        self, dtype: torch.dtype, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        count = math.prod(self.shape)
        tile = torch.randn(min(count, _PERIOD), generator=generator) * _SPREAD + self._center
        whole = tile.to(self._device, dtype).repeat(-(-count // _PERIOD))[:count].view(self.shape)
        part = whole[rows or slice(None)]
        return (part if cols is None else part[:, cols]).clone(
            memory_format=torch.contiguous_format
        )

    def blocks(self, rows: slice | None = None) -> np.ndarray:
        raise no_blocks(self.name, self.scheme)


class DummySource:
    """See WeightSource. Its tensors are made on `device`."""

    def __init__(self, files: ModelFiles, spec: ModelSpec, device: torch.device | None = None):
        self.files, self.spec = files, spec
        self._device = device or torch.device("cpu")
        self._shapes = tensor_shapes(spec)

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def get(self, name: str) -> DummyHandle:
        shape = self._shapes[name]
        # A norm multiplies by (offset + w), which is to be near one.
        center = 1.0 - self.spec.norm_offset if name.endswith("norm.weight") else 0.0
        return DummyHandle(name, shape, self.spec.dtype, center, self._device)

    def total_bytes(self) -> int:
        size = 4 if self.spec.dtype == "float32" else 2
        return sum(math.prod(shape) for shape in self._shapes.values()) * size

    def close(self) -> None:
        """Nothing is open."""
