"""Linear layers. One class reads one or several stored matrices into one packed weight; the shard rule is data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engine.layers.base import Layer, Weight, dtype_name, shard, shard_kv_heads
from headrace.platforms.queries import LinearQuery

if TYPE_CHECKING:
    import torch

    from headrace.engine.models.base import BuildContext
    from headrace.engine.weights.source import TensorHandle


@dataclass(frozen=True, slots=True)
class Part:
    """One stored matrix `<name>.weight` [out, in] and the rows of it that this rank holds."""

    name: str
    out_features: int
    rows: slice


class Linear(Layer):
    """y[T, sum of rows] = x[T, in] @ concat(parts)^T (+ bias), on this rank's rows (column parallel)."""

    def __init__(
        self,
        ctx: BuildContext,
        parts: Sequence[Part],
        in_features: int,
        bias: bool,
        cols: slice | None = None,
    ) -> None:
        self._ctx = ctx
        self._parts = tuple(parts)
        self._in_features = in_features  # of the stored matrices
        self._cols = cols or slice(0, in_features)
        self._out = sum(part.rows.stop - part.rows.start for part in self._parts)
        self._bias = bias
        width = self._cols.stop - self._cols.start
        query = LinearQuery(width, self._out, dtype_name(ctx.dtype), bias=bias)
        self._op = ctx.ops.bind("linear", query)
        self._packed: Any = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._op(x, self._packed)

    def weights(self) -> Sequence[Weight]:
        wanted = [
            Weight(f"{part.name}.weight", (part.out_features, self._in_features))
            for part in self._parts
        ]
        if self._bias:
            wanted += [Weight(f"{part.name}.bias", (part.out_features,)) for part in self._parts]
        return wanted

    def load(self, tensors: Mapping[str, TensorHandle]) -> None:
        weight = self._read(tensors, "weight", self._cols)
        self._packed = self._op.pack(weight, self._read_bias(tensors))

    def held(self) -> Sequence[Any]:
        return (self._packed,)

    def _read_bias(self, tensors: Mapping[str, TensorHandle]) -> torch.Tensor | None:
        return self._read(tensors, "bias", None) if self._bias else None

    def _read(
        self, tensors: Mapping[str, TensorHandle], kind: str, cols: slice | None
    ) -> torch.Tensor:
        import torch

        ctx = self._ctx
        whole = cols is None or cols.stop - cols.start == self._in_features
        wanted = None if whole else cols
        if len(self._parts) == 1:
            part = self._parts[0]
            return tensors[f"{part.name}.{kind}"].read(ctx.dtype, part.rows, wanted).to(ctx.device)
        # Filled part by part, so that never more than one part exists twice.
        shape = (self._out,) if cols is None else (self._out, cols.stop - cols.start)
        merged = torch.empty(shape, dtype=ctx.dtype, device=ctx.device)
        start = 0
        for part in self._parts:
            stop = start + part.rows.stop - part.rows.start
            merged[start:stop].copy_(
                tensors[f"{part.name}.{kind}"].read(ctx.dtype, part.rows, wanted)
            )
            start = stop
        return merged


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
        return self._all_reduce(self._op(x, self._packed))

    def _read_bias(self, tensors: Mapping[str, TensorHandle]) -> torch.Tensor | None:
        bias = super()._read_bias(tensors)
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
