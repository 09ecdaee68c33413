"""The tensors of a GGUF model under their Hugging Face names, dequantized while they are read."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.gguf import GGUFFile
from headrace.engine.weights.gguf_names import ROPE_TENSORS, hf_name, row_order
from headrace.engine.weights.mapped_tensor import MappedTensor
from headrace.engine.weights.source import ModelFiles


class GGUFSource:
    """See WeightSource. Takes over `file` and closes it."""

    def __init__(self, files: ModelFiles, file: GGUFFile, spec: ModelSpec):
        self.files, self.spec = files, spec
        self._file = file
        self._tensors = {
            hf_name(spec.architecture, name): tensor
            for name, tensor in file.tensors.items()
            if name not in ROPE_TENSORS
        }

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def get(self, name: str) -> MappedTensor:
        tensor = self._tensors[name]
        data = self._file.parts[tensor.part].data
        order = row_order(self.spec, name)
        shape = tensor.shape
        if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
            shape = (1, *shape)  # a matrix of one row, stored as a vector
        return MappedTensor(name, shape, tensor.type, data, tensor.offset, order)

    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def close(self) -> None:
        self._file.close()
