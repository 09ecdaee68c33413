"""Tensors read out of mapped files, dequantized or converted on the way: what GGUF and safetensors share."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.weights.dequant import CHUNK, dequantize
from headrace.engine.weights.ggml_types import GGMLType
from headrace.engine.weights.mapping import release
from headrace.engine.weights.source import ModelError, TensorHandle
from headrace.engine.weights.unpack import PLAIN, unpack
from headrace.engine.weights.upload import Fill, Uploader

# Values read between two releases of what was read, where rows need no gathering.
_SPAN = 1 << 22
# The same where a device converts or dequantizes them: several threads hold a few times as many in its memory.
_DEVICE_SPAN = 1 << 23


class MappedBlocks(np.ndarray):
    """Stored rows in a mapped file. `drop(first, stop)` takes rows that will not be read again out of memory (reading
    them all the same brings them back): a kernel that packs from them then never holds both whole."""

    drop: Callable[[int, int], None] | None = None  # on what `blocks` returns, not on its slices


class Stored(NamedTuple):
    """Where a tensor lies."""

    path: str
    data: mmap.mmap  # of the file
    offset: int


class MappedTensor(TensorHandle):
    """One stored tensor; see TensorHandle.

    It lies in the file row after row, in blocks of `kind`. `order` says which stored row each row is, where they
    differ. With `upload`, what is read into that device's memory is converted and dequantized there.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        kind: GGMLType,
        stored: Stored,
        order: NDArray[np.intp] | None = None,
        upload: Uploader | None = None,
    ):
        self.name, self.shape = name, shape
        self.scheme = (
            str(PLAIN[kind.name]).removeprefix("torch.") if kind.name in PLAIN else kind.name
        )
        self._kind, self._order, self._upload = kind, order, upload
        self._path, self._data, self._offset = stored
        self._width = shape[-1] if shape else 1
        count = int(np.prod(shape))
        view = np.frombuffer(stored.data, np.uint8, kind.row_bytes(count), stored.offset)
        self._raw = view.reshape(-1, kind.row_bytes(self._width))

    def read(
        self, dtype: torch.dtype, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        rows, cols = rows or slice(None), cols or slice(None)
        if len(self.shape) > 1:
            shape = (_length(rows, len(self._raw)), _length(cols, self._width))
            out = torch.empty(shape, dtype=dtype)
            self._read(out, self._order, rows, cols)
            return out
        # A vector is stored as one row: its rows are that row's columns.
        picked = rows if self._order is None else slice(None)
        out = torch.empty(1, _length(picked, self._width), dtype=dtype)
        self._read(out, None, slice(None), picked)
        return out[0] if self._order is None else out[0][torch.from_numpy(self._order[rows])]

    def read_into(
        self, out: torch.Tensor, rows: slice | None = None, cols: slice | None = None
    ) -> None:
        matrix = len(self.shape) > 1
        if matrix and self._upload is not None:
            self._send(out, self._upload, rows or slice(None), cols or slice(None))
        elif matrix and out.device.type == "cpu":
            self._read(out, self._order, rows or slice(None), cols or slice(None))
        else:
            out.copy_(self.read(out.dtype, rows, cols))

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
        self, out: torch.Tensor, order: NDArray[np.intp] | None, rows: slice, cols: slice
    ) -> None:
        """Fills [rows, cols] on the host, a few rows at a time; what was read is released."""
        raw = self._raw[rows] if order is None else self._raw
        picked = None if order is None else order[rows]
        count = len(raw) if picked is None else len(picked)
        begin, end, lead = self._within(cols)
        columns = slice(begin * self._kind.size, end * self._kind.size)
        width, stored = out.shape[1], (end - begin) * self._kind.block
        span = _SPAN if picked is None and stored == self._width else CHUNK
        step = max(1, span // max(1, stored))
        for low in range(0, count, step):
            high = min(low + step, count)
            part = raw[low:high] if picked is None else raw[picked[low:high]]
            part = np.ascontiguousarray(part[:, columns])
            if stored == width:
                _fill(self._kind, part, out[low:high].view(-1))
            else:
                wide = torch.empty(high - low, stored)
                _fill(self._kind, part, wide.view(-1))
                out[low:high] = wide[:, lead : lead + width]
            if picked is None:
                self._release(rows.indices(len(self._raw))[0] + low, high - low)
        if picked is not None:
            self._release(0, len(self._raw))

    def _send(self, out: torch.Tensor, upload: Uploader, rows: slice, cols: slice) -> None:
        """Fills [rows, cols] on a device: stored bytes go there, and become values there."""
        first = rows.indices(len(self._raw))[0]
        begin, end, lead = self._within(cols)
        count, width = out.shape
        stored, unit = (end - begin) * self._kind.block, (end - begin) * self._kind.size
        straight = self._order is None and stored == self._width
        if straight and width == stored and PLAIN.get(self._kind.name) == out.dtype:
            fill = upload.from_file(self._path, self._offset + first * unit)
            upload.send(out.view(-1).view(torch.uint8), fill)
            return
        step = max(1, _DEVICE_SPAN // stored)
        for low in range(0, count, step):
            part = out[low : low + step]
            raw = torch.empty(len(part) * unit, dtype=torch.uint8, device=out.device)
            if straight:
                at = self._offset + (first + low) * unit
                upload.send(raw, upload.from_file(self._path, at))
            else:
                upload.send(raw, self._gather(rows, low, begin * self._kind.size, unit), unit)
            values = unpack(self._kind, raw).view(len(part), stored)
            part.copy_(values[:, lead : lead + width])

    def _gather(self, rows: slice, low: int, begin: int, unit: int) -> Fill:
        """`unit` bytes from `begin` on of each row from `low` of `rows` on, which do not lie one after the other."""
        picked = np.arange(len(self._raw)) if self._order is None else self._order
        picked = picked[rows][low:]

        def fill(start: int, memory: NDArray[np.uint8]) -> None:
            here = picked[start // unit : (start + len(memory)) // unit]
            raw = self._raw[:, begin : begin + unit]
            np.take(raw, here, axis=0, out=memory.reshape(-1, unit), mode="clip")
            if self._order is None:
                self._release(int(here[0]), len(here))

        return fill

    def _within(self, cols: slice) -> tuple[int, int, int]:
        """The blocks of a row that hold these columns, from and to; where in the first one they begin."""
        first, stop, _ = cols.indices(self._width)
        begin = first // self._kind.block
        return begin, -(-stop // self._kind.block), first - begin * self._kind.block

    def _release(self, first_row: int, rows: int) -> None:
        start = self._offset + first_row * self._raw.shape[1]
        release(self._data, start, start + rows * self._raw.shape[1])


def _length(part: slice, whole: int) -> int:
    return len(range(*part.indices(whole)))


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
