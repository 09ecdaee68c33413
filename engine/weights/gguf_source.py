"""The tensors of a GGUF model under their Hugging Face names, dequantized while they are read."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.gguf import GGUFFile
from headrace.engine.weights.gguf_names import ROPE_TENSORS, hf_name, row_order
from headrace.engine.weights.mapped_tensor import MappedTensor, Stored
from headrace.engine.weights.source import ModelFiles
from headrace.engine.weights.upload import Uploader


class GGUFSource:
    """See WeightSource. Takes over `file` and closes it."""

    def __init__(
        self, files: ModelFiles, file: GGUFFile, spec: ModelSpec, upload: Uploader | None = None
    ):
        self.files, self.spec, self._upload = files, spec, upload
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
        part = self._file.parts[tensor.part]
        stored = Stored(part.path, part.data, tensor.offset)
        order = row_order(self.spec, name)
        shape = tensor.shape
        if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
            shape = (1, *shape)  # a matrix of one row, stored as a vector
        return MappedTensor(name, shape, tensor.type, stored, order, self._upload)

    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def close(self) -> None:
        if self._upload is not None:
            self._upload.close()
        self._file.close()
