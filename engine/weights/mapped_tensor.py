"""Tensors read out of mapped files, dequantized or converted on the way: what GGUF and safetensors share."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.weights.dequant import CHUNK, dequantize
from headrace.engine.weights.ggml_types import GGMLType
from headrace.engine.weights.mapping import release
from headrace.engine.weights.source import ModelError

# Types whose values are numbers of torch's own, by ggml's name.
PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Values read between two releases of what was read, where rows need no gathering.
_SPAN = 1 << 22


class MappedBlocks(np.ndarray):
    """Stored rows in a mapped file. `drop(first, stop)` takes rows that will not be read again out of memory (reading
    them all the same brings them back): a kernel that packs from them then never holds both whole."""

    drop: Callable[[int, int], None] | None = None  # on what `blocks` returns, not on its slices


class MappedTensor:
    """One stored tensor; see TensorHandle.

    `data` holds it from `offset` on, row after row, in blocks of `kind`. `order` says which stored row each row is,
    where they differ.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        kind: GGMLType,
        data: mmap.mmap,
        offset: int,
        order: NDArray[np.intp] | None = None,
    ):
        self.name, self.shape = name, shape
        self.scheme = (
            str(PLAIN[kind.name]).removeprefix("torch.") if kind.name in PLAIN else kind.name
        )
        self._kind, self._data, self._offset, self._order = kind, data, offset, order
        self._width = shape[-1] if shape else 1
        count = int(np.prod(shape))
        view = np.frombuffer(data, np.uint8, kind.row_bytes(count), offset)
        self._raw = view.reshape(-1, kind.row_bytes(self._width))

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
        """Stored rows [rows, bytes a row]: MappedBlocks, or a copy where rows are stored in another order."""
        if self._kind.name in PLAIN:
            raise no_blocks(self.name, self.scheme)
        picked = rows or slice(None)
        if self._order is not None:
            return self._raw[self._order[picked]]
        view = self._raw[picked].view(MappedBlocks)
        start = picked.indices(len(self._raw))[0]
        view.drop = lambda first, stop: self._release(start + first, stop - first)
        return view

    def _read(
        self, dtype: torch.dtype, order: NDArray[np.intp] | None, rows: slice, cols: slice
    ) -> torch.Tensor:
        """[rows, cols], a few rows at a time; what was read is released."""
        raw = self._raw[rows] if order is None else self._raw
        picked = None if order is None else order[rows]
        count = len(raw) if picked is None else len(picked)
        block, size = self._kind.block, self._kind.size
        first, stop, _ = cols.indices(self._width)
        begin, end = first // block, -(-stop // block)  # the blocks that hold these columns
        lead, stored = first - begin * block, (end - begin) * block
        out = torch.empty(count, stop - first, dtype=dtype)
        span = _SPAN if picked is None and stored == self._width else CHUNK
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
        start = self._offset + first_row * self._raw.shape[1]
        release(self._data, start, start + rows * self._raw.shape[1])


def no_blocks(name: str, scheme: str) -> ModelError:
    return ModelError(
        f"{name} holds plain {scheme} values, not quantized blocks; read() gives them"
    )


def _fill(kind: GGMLType, raw: NDArray[np.uint8], out: torch.Tensor) -> None:
    """Writes the values of whole rows `raw` (contiguous) into the flat tensor `out`."""
    flat = raw.reshape(-1)
    plain = PLAIN.get(kind.name)
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
