"""Linear layers. One class reads one or several stored matrices into one packed weight; the shard rule is data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from headrace.engine.layers.base import Layer, Weight, dtype_name, shard, shard_kv_heads
from headrace.platforms.queries import LinearQuery

if TYPE_CHECKING:
    import torch

    from headrace.engine.layers.norm import AddRMSNorm
    from headrace.engine.models.base import BuildContext
    from headrace.engine.weights.source import TensorHandle


@dataclass(frozen=True, slots=True)
class Part:
    """One stored matrix `<name>.weight` [out, in] and the rows of it that this rank holds."""

    name: str
    out_features: int
    rows: slice

    @property
    def count(self) -> int:
        return self.rows.stop - self.rows.start


class Linear(Layer):
    """y[T, sum of rows] = x[T, in] @ concat(parts)^T (+ bias), on this rank's rows (column parallel).

    Parts whose stored blocks can be computed with keep them; neighbours of one scheme are one matrix. When a scheme
    has no kernel on this device, all parts are dequantized into one.
    """

    def __init__(
        self,
        ctx: BuildContext,
        parts: Sequence[Part],
        in_features: int,
        bias: bool,
        cols: slice | None = None,
        out_dtype: str = "",
    ) -> None:
        self._ctx = ctx
        self._parts = tuple(parts)
        self._in_features = in_features  # of the stored matrices
        self._cols = cols or slice(0, in_features)
        self._out = sum(part.count for part in self._parts)
        self._bias = bias
        self._out_dtype = out_dtype  # "" = the compute dtype
        segments = self._by_scheme()
        if not all(self._keeps(scheme, rows) for scheme, rows in segments):
            segments = [("", self._parts)]
        self._segments = [
            (scheme, rows, ctx.ops.bind("linear", self._query(scheme, rows)))
            for scheme, rows in segments
        ]
        self._packed: list[Any] = []

    def _by_scheme(self) -> list[tuple[str, tuple[Part, ...]]]:
        found = ((self._ctx.schemes.get(f"{p.name}.weight", ""), p) for p in self._parts)
        return [(s, tuple(p for _, p in run)) for s, run in groupby(found, key=itemgetter(0))]

    def _query(self, scheme: str, parts: Sequence[Part]) -> LinearQuery:
        rows, width = sum(part.count for part in parts), self._cols.stop - self._cols.start
        dtype = dtype_name(self._ctx.dtype)
        return LinearQuery(width, rows, dtype, scheme, self._bias, self._out_dtype)

    def _keeps(self, scheme: str, parts: Sequence[Part]) -> bool:
        return not scheme or self._ctx.ops.can("linear", self._query(scheme, parts))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(self._segments) == 1:
            return self._segments[0][2](x, self._packed[0])
        y, start = self._segments[0][2].empty(x.shape[0], self._out), 0
        for (_, parts, op), packed in zip(self._segments, self._packed, strict=True):
            stop = start + sum(part.count for part in parts)
            op(x, packed, y[:, start:stop])
            start = stop
        return y

    @property
    def gated_rows(self) -> int:
        """Up to so many rows `gated` serves better than the activation behind the linear."""
        if len(self._segments) > 1:
            return 0
        return getattr(self._segments[0][2], "gated_rows", 0)  # nothing is bound in a recorder

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """act(gate) * up of the result's halves, as LinearImpl.gated."""
        gated: torch.Tensor = self._segments[0][2].gated(x, self._packed[0], activation)
        return gated

    def normed(
        self,
        norm: AddRMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        activation: str = "",
        keep: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(`norm`, then this or `gated` with an activation; the new residual; with `keep` what the norm gave)."""
        op, packed = self._segments[0][2], self._packed[0]
        rows = op.normed_rows if len(self._segments) == 1 else 0
        if residual is not None and x.shape[0] <= rows:
            fused: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] = op.normed(
                x, residual, norm.rule, packed, activation, keep
            )
            return fused
        x, residual = norm(x, residual)
        return self.gated(x, activation) if activation else self(x), residual, x

    def weights(self) -> Sequence[Weight]:
        wanted = [
            Weight(f"{part.name}.weight", (part.out_features, self._in_features))
            for part in self._parts
        ]
        if self._bias:
            wanted += [Weight(f"{part.name}.bias", (part.out_features,)) for part in self._parts]
        return wanted

    def load(self, tensors: Mapping[str, TensorHandle]) -> None:
        self._packed = [
            op.pack_named(
                matrix_name(parts, self._cols),
                partial(self._read_weight, tensors, parts, scheme),
                self._read_bias(tensors, parts),
            )
            for scheme, parts, op in self._segments
        ]

    def held(self) -> Sequence[Any]:
        return self._packed

    def _read_weight(
        self, tensors: Mapping[str, TensorHandle], parts: Sequence[Part], scheme: str
    ) -> Any:
        if scheme:
            return stored_blocks(tensors, parts, self._in_features, self._cols)
        return self._read(tensors, parts, "weight")

    def _read_bias(
        self, tensors: Mapping[str, TensorHandle], parts: Sequence[Part]
    ) -> torch.Tensor | None:
        return self._read(tensors, parts, "bias") if self._bias else None

    def _read(
        self, tensors: Mapping[str, TensorHandle], parts: Sequence[Part], kind: str
    ) -> torch.Tensor:
        import torch

        ctx, cols = self._ctx, self._cols
        whole = kind == "bias" or cols.stop - cols.start == self._in_features
        wanted = None if whole else cols
        out = sum(part.count for part in parts)
        shape = (out,) if kind == "bias" else (out, cols.stop - cols.start)
        merged = torch.empty(shape, dtype=ctx.dtype, device=ctx.device)
        start = 0
        for part in parts:
            stop = start + part.count
            handle = tensors[f"{part.name}.{kind}"]
            handle.read_into(merged[start:stop], part.rows, wanted)
            start = stop
        return merged


def matrix_name(parts: Sequence[Part], cols: slice) -> str:
    """What tells a packed matrix from all others of a model: its parts, the rows and the columns of them."""
    rows = "+".join(f"{part.name}[{part.rows.start}:{part.rows.stop}]" for part in parts)
    return f"{rows}[{cols.start}:{cols.stop}]"


def stored_blocks(
    tensors: Mapping[str, TensorHandle], parts: Sequence[Part], in_features: int, cols: slice
) -> Any:
    """Stored quantized rows of the parts [rows, bytes of the columns `cols`].

    Columns are cut between blocks: that a kernel takes rows of this width has made sure of it.
    """
    import numpy as np

    pieces = []
    for part in parts:
        stored = tensors[f"{part.name}.weight"].blocks(part.rows)
        low, high = (at * stored.shape[1] // in_features for at in (cols.start, cols.stop))
        pieces.append(stored if high - low == stored.shape[1] else stored[:, low:high])
    if len(pieces) == 1:
        return pieces[0]
    joined = np.concatenate(pieces)
    for piece in pieces:
        if drop := getattr(piece, "drop", None):
            drop(0, len(piece))
    return joined


class RowParallelLinear(Linear):
    """y[T, out] = sum over ranks of x[T, in / ranks] @ w[:, this rank's columns]^T (+ bias once)."""

    def __init__(
        self, ctx: BuildContext, name: str, in_features: int, out_features: int, bias: bool
    ) -> None:
        parts = (Part(name, out_features, slice(0, out_features)),)
        cols = shard(in_features, ctx, f"input features of {name}")
        super().__init__(ctx, parts, in_features, bias, cols)
        self._all_reduce = ctx.collectives.all_reduce

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._all_reduce(self.partial(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's term of the sum."""
        return super().__call__(x)

    def _read_bias(
        self, tensors: Mapping[str, TensorHandle], parts: Sequence[Part]
    ) -> torch.Tensor | None:
        bias = super()._read_bias(tensors, parts)
        if bias is not None and self._ctx.rank:
            bias.zero_()  # the sum over ranks must hold it once; every rank keeps the same kernel
        return bias


def qkv_linear(
    ctx: BuildContext, name: str, hidden: int, heads: tuple[int, int, int], bias: bool
) -> Linear:
    """q, k and v in one matrix; `heads` is (query heads, KV heads, head size) of the whole model.

    Rows of the result: this rank's query heads, then its key heads, then its value heads.
    """
    q_heads, kv_heads, size = heads
    q = shard(q_heads, ctx, "attention heads")
    kv = shard_kv_heads(kv_heads, ctx)
    q_rows, kv_rows = (slice(s.start * size, s.stop * size) for s in (q, kv))
    parts = (
        Part(f"{name}.q_proj", q_heads * size, q_rows),
        Part(f"{name}.k_proj", kv_heads * size, kv_rows),
        Part(f"{name}.v_proj", kv_heads * size, kv_rows),
    )
    return Linear(ctx, parts, hidden, bias)


def gate_up_linear(
    ctx: BuildContext, name: str, hidden: int, intermediate: int, bias: bool
) -> Linear:
    """gate and up in one matrix: [T, 2 * intermediate / ranks], gate first."""
    rows = shard(intermediate, ctx, "intermediate features")
    parts = tuple(Part(f"{name}.{p}", intermediate, rows) for p in ("gate_proj", "up_proj"))
    return Linear(ctx, parts, hidden, bias)
