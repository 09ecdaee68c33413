"""Safetensors checkpoints, single and sharded: memory-mapped, read slice by slice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.safetensors_files import FLOATS, read_shards, refuse_types
from headrace.engine.weights.source import ModelError, ModelFiles

if TYPE_CHECKING:
    import numpy as np


class PlainHandle:
    """A tensor stored as numbers; see TensorHandle. `lazy` gives a torch tensor when it is indexed."""

    def __init__(self, name: str, shape: tuple[int, ...], scheme: str, lazy: Any):
        self.name, self.shape, self.scheme = name, shape, scheme
        self._lazy = lazy

    def read(
        self, dtype: torch.dtype, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        index: Any = rows or slice(None)
        if cols is not None:
            index = (index, cols)
        # The copy leaves the file: a file that is replaced later changes nothing here.
        return self._lazy[index].to(dtype, copy=True, memory_format=torch.contiguous_format)

    def blocks(self, rows: slice | None = None) -> np.ndarray:
        raise no_blocks(self.name, self.scheme)


def no_blocks(name: str, scheme: str) -> ModelError:
    return ModelError(
        f"{name} holds plain {scheme} values, not quantized blocks; read() gives them"
    )


class SafetensorsSource:
    """See WeightSource. Raises ModelError when a file is damaged, short, or holds types that cannot be read."""

    def __init__(self, files: ModelFiles, spec: ModelSpec):
        self.files, self.spec = files, spec
        self._tensors = read_shards(files.weights, files.index)
        refuse_types(self._tensors)
        self._opened: dict[str, Any] = {
            path: safe_open(path, framework="pt") for path in files.weights
        }

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def get(self, name: str) -> PlainHandle:
        tensor = self._tensors[name]
        lazy = self._opened[tensor.path].get_slice(name)
        return PlainHandle(name, tensor.shape, FLOATS.get(tensor.dtype, tensor.dtype), lazy)

    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def close(self) -> None:
        self._opened.clear()
