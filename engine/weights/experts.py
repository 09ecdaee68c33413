"""Expert weights under one set of names, however a checkpoint stores them. Torch-free.

Layers ask for `...mlp.experts.<e>.{gate,up,down}_proj.weight`, a matrix for each expert, as most checkpoints have them.
GGUF files stack a layer's experts into one tensor of three dimensions; transformers, asked not to save in the form of
the hub, stacks them too, gate above up. Such a tensor is shown as its parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from headrace.engine.weights.source import TensorHandle, WeightSource

if TYPE_CHECKING:
    import numpy as np
    import torch

_STACKED = re.compile(r"^(.*\.experts)\.(gate_up|gate|up|down)_proj(?:\.weight)?$")


class Piece(NamedTuple):
    """Rows of a stored tensor, seen as a matrix of all its rows, that are a tensor of their own."""

    name: str
    first: int
    rows: int


def pieces(name: str, shape: tuple[int, ...]) -> list[Piece]:
    """What a stored tensor holds: each expert's matrices, or itself when it is no stack of experts."""
    match = _STACKED.match(name)
    if match is None or len(shape) != 3:
        return [Piece(name, 0, shape[0] if shape else 1)]
    prefix, kind = match.groups()
    kinds = ("gate", "up") if kind == "gate_up" else (kind,)
    rows = shape[1] // len(kinds)
    return [
        Piece(f"{prefix}.{expert}.{part}_proj.weight", expert * shape[1] + at * rows, rows)
        for expert in range(shape[0])
        for at, part in enumerate(kinds)
    ]


class _Rows(TensorHandle):
    """A TensorHandle over some rows of a stacked tensor."""

    def __init__(self, stack: TensorHandle, piece: Piece):
        self.name, self.scheme = piece.name, stack.scheme
        self.shape: tuple[int, ...] = (piece.rows, stack.shape[-1])
        self._stack, self._first = stack, piece.first

    def read(
        self, dtype: torch.dtype, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        return self._stack.read(dtype, self._within(rows), cols)

    def read_into(
        self, out: torch.Tensor, rows: slice | None = None, cols: slice | None = None
    ) -> None:
        self._stack.read_into(out, self._within(rows), cols)

    def blocks(self, rows: slice | None = None) -> np.ndarray:
        return self._stack.blocks(self._within(rows))

    def _within(self, rows: slice | None) -> slice:
        start, stop, _ = (rows or slice(None)).indices(self.shape[0])
        return slice(self._first + start, self._first + stop)


class ExpertSource:
    """A WeightSource that shows the stacks of another as their parts."""

    def __init__(self, source: WeightSource):
        self.spec, self.files = source.spec, source.files
        self._source = source
        self._found = {
            piece.name: (name, piece)
            for name in source.names()
            for piece in pieces(name, source.get(name).shape if _STACKED.match(name) else ())
        }

    def names(self) -> Iterable[str]:
        return self._found.keys()

    def get(self, name: str) -> TensorHandle:
        stored, piece = self._found[name]
        handle = self._source.get(stored)
        return handle if stored == name else _Rows(handle, piece)

    def total_bytes(self) -> int:
        return self._source.total_bytes()

    def close(self) -> None:
        self._source.close()


def by_expert(source: WeightSource) -> WeightSource:
    """The source itself when the model has no experts."""
    return ExpertSource(source) if source.spec.experts else source
