"""The tensors of a GGUF model under their Hugging Face names, dequantized while they are read."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.dequant import CHUNK, dequantize
from headrace.engine.weights.ggml_types import GGMLType
from headrace.engine.weights.gguf import GGUFFile, GGUFTensor
from headrace.engine.weights.gguf_names import ROPE_TENSORS, hf_name, row_order
from headrace.engine.weights.source import ModelFiles

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SCHEMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Values read between two releases of what was read, where rows need no gathering.
_SPAN = 1 << 22


class GGUFHandle:
    """One tensor; see TensorHandle. `order` says which stored row each row is, where they differ."""

    def __init__(
        self, name: str, file: GGUFFile, tensor: GGUFTensor, order: NDArray[np.intp] | None
    ):
        self.name = name
        self.shape = tensor.shape
        self.scheme = _SCHEMES.get(tensor.type.name, tensor.type.name)
        self._file, self._tensor, self._kind = file, tensor, tensor.type
        self._order = order
        row = tensor.type.row_bytes(tensor.shape[-1])
        self._raw = np.frombuffer(file.rows(tensor), np.uint8).reshape(-1, row)

    def read(
        self, dtype: torch.dtype, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        if len(self.shape) > 1:
            return self._read(dtype, self._order, rows or slice(None), cols or slice(None))
        # A vector is stored as one row: its rows are that row's columns.
        if self._order is None:
            return self._read(dtype, None, slice(None), rows or slice(None)).view(-1)
        whole = self._read(dtype, None, slice(None), slice(None)).view(-1)
        return whole[torch.from_numpy(self._order[rows or slice(None)])]

    def blocks(self, rows: slice | None = None) -> NDArray[np.uint8]:
        """Stored rows [rows, bytes a row]: a view of the file, or a copy where rows are stored in another order."""
        picked = rows or slice(None)
        return self._raw[picked if self._order is None else self._order[picked]]

    def _read(
        self, dtype: torch.dtype, order: NDArray[np.intp] | None, rows: slice, cols: slice
    ) -> torch.Tensor:
        """[rows, cols], a few rows at a time. What was read is released: else loading would hold the model twice."""
        raw = self._raw[rows] if order is None else self._raw
        picked = None if order is None else order[rows]
        count = len(raw) if picked is None else len(picked)
        block, size, width = self._kind.block, self._kind.size, self.shape[-1]
        first, stop, _ = cols.indices(width)
        begin, end = first // block, -(-stop // block)  # the blocks that hold these columns
        lead, stored = first - begin * block, (end - begin) * block
        out = torch.empty(count, stop - first, dtype=dtype)
        span = _SPAN if picked is None and stored == width else CHUNK
        step = max(1, span // max(1, stored))
        for low in range(0, count, step):
            high = min(low + step, count)
            part = raw[low:high] if picked is None else raw[picked[low:high]]
            part = np.ascontiguousarray(part[:, begin * size : end * size])
            if stored == stop - first:
                _fill(self._kind, part, out[low:high].view(-1))
            else:
                wide = torch.empty(high - low, stored)
                _fill(self._kind, part, wide.view(-1))
                out[low:high] = wide[:, lead : lead + stop - first]
            if picked is None:
                self._release(rows.indices(len(self._raw))[0] + low, high - low)
        if picked is not None:
            self._release(0, len(self._raw))
        return out

    def _release(self, first_row: int, rows: int) -> None:
        row = self._raw.shape[1]
        self._file.release(self._tensor, first_row * row, (first_row + rows) * row)


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

    def get(self, name: str) -> GGUFHandle:
        tensor = self._tensors[name]
        return GGUFHandle(name, self._file, tensor, row_order(self.spec, name))

    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def close(self) -> None:
        self._file.close()


def _fill(kind: GGMLType, raw: NDArray[np.uint8], out: torch.Tensor) -> None:
    """Writes the values of whole rows `raw` (contiguous) into the flat tensor `out`."""
    flat = raw.reshape(-1)
    plain = _PLAIN.get(kind.name)
    if plain is None:

        def store(start: int, values: NDArray[np.float32]) -> None:
            out[start : start + len(values)] = torch.from_numpy(values)

        dequantize(kind, flat, store)
        return
    # Copied a chunk at a time: torch wants writable memory, and the file's is not.
    for start in range(0, len(out), CHUNK):
        stop = min(start + CHUNK, len(out))
        chunk = flat[start * kind.size : stop * kind.size].copy()
        out[start:stop] = torch.from_numpy(chunk).view(plain)
