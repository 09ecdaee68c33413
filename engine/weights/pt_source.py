"""PyTorch checkpoints (pytorch_model.bin, single and sharded), read as data only: no code of theirs runs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.mapped_tensor import no_blocks
from headrace.engine.weights.safetensors_files import read_index
from headrace.engine.weights.source import ModelError, ModelFiles, TensorHandle


class TorchTensor(TensorHandle):
    """One stored tensor; see TensorHandle."""

    def __init__(self, name: str, tensor: torch.Tensor):
        self.name, self.shape = name, tuple(tensor.shape)
        self.scheme = str(tensor.dtype).removeprefix("torch.")
        self._tensor = tensor

    def read(
        self, dtype: torch.dtype, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        whole = self._tensor.flatten(0, -2) if self._tensor.ndim > 2 else self._tensor
        part = whole if rows is None else whole[rows]
        part = part if cols is None else part[:, cols]
        # The copy leaves the file: a file that is replaced later changes nothing here.
        return part.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def blocks(self, rows: slice | None = None) -> NDArray[np.uint8]:
        raise no_blocks(self.name, self.scheme)


class TorchSource:
    """See WeightSource. Raises ModelError when a file is damaged, holds code, or a tensor is not where it should be."""

    def __init__(self, files: ModelFiles, spec: ModelSpec):
        self.files, self.spec = files, spec
        self._tensors: dict[str, torch.Tensor] = {}
        problems = []
        for path in files.weights:
            try:
                self._tensors.update(_load(path))
            except ModelError as error:
                problems.append(str(error))
        if problems:
            raise ModelError("; ".join(problems))
        if files.index:
            lost = [name for name in read_index(files.index) if name not in self._tensors]
            if lost:
                raise ModelError(
                    f"{files.index} names tensors that its files lack: {', '.join(lost)}; download them again"
                )

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def get(self, name: str) -> TorchTensor:
        return TorchTensor(name, self._tensors[name])

    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def close(self) -> None:
        self._tensors.clear()


def _load(path: str) -> dict[str, torch.Tensor]:
    try:
        state = _open(path)
    except Exception as error:
        # torch raises half a dozen types for damaged files and for code in them
        reason = str(error).split("\n", 1)[0]
        raise ModelError(
            f"{path} cannot be read as plain weights ({reason}); download it again, or use the safetensors files"
        ) from None
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise ModelError(f"{path} holds more than weights; use the safetensors files of the model")
    strange = sorted(
        {str(t.dtype) for t in state.values() if t.ndim > 1 and not t.is_floating_point()}
    )
    if strange:
        raise ModelError(
            f"{path} holds {', '.join(strange)} weights, which are not supported; use float32, bfloat16 or float16 ones"
        )
    return state


def _open(path: str) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        # The format before torch 1.6 cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True)
