"""Both ends of a decoder that know the vocabulary: the embedding table and the language model head."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from headrace.engine.layers.base import Layer, Weight, dtype_name
from headrace.platforms.queries import EmbeddingQuery, LinearQuery

if TYPE_CHECKING:
    import torch

    from headrace.engine.models.base import BuildContext
    from headrace.engine.models.spec import ModelSpec
    from headrace.engine.weights.source import TensorHandle

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Vocabulary(Layer):
    """Embedding and head, divided over the ranks by rows of the table; tied ones are one tensor in memory.

    Every rank holds ceil(vocab / ranks) rows; rows past the vocabulary are zero and their logits are cut off.
    A checkpoint that is marked as tied and yet stores a head of its own: equal values are tied, others are not
    (what transformers does).
    """

    def __init__(self, ctx: BuildContext, spec: ModelSpec) -> None:
        self._ctx = ctx
        self._spec = spec
        self._rows = -(-spec.vocab // ctx.world)
        self._start = self._rows * ctx.rank
        self._softcap = spec.final_softcap
        dtype = dtype_name(ctx.dtype)
        # What a scale in a buffer of the compute dtype would be: sqrt(hidden) is rounded before it is used.
        scale = rounded(spec.embedding_scale, dtype)
        lookup = EmbeddingQuery(self._rows, spec.hidden, dtype, self._scheme(EMBED), scale)
        self._table_scheme = self._kept("embedding", lookup)
        self._lookup = ctx.ops.bind("embedding", replace(lookup, scheme=self._table_scheme))
        stored = HEAD if HEAD in ctx.schemes else EMBED
        head = LinearQuery(
            spec.hidden, self._rows, dtype, self._scheme(stored), out_dtype="float32"
        )
        self._head_scheme = self._kept("linear", head)
        self._head = ctx.ops.bind("linear", replace(head, scheme=self._head_scheme))
        self._table: Any = None
        self._matrix: Any = None

    def _scheme(self, name: str) -> str:
        # rows that pad the last rank's share have no blocks in the file
        return (
            ""
            if self._rows * self._ctx.world != self._spec.vocab
            else self._ctx.schemes.get(name, "")
        )

    def _kept(self, op: str, query: Any) -> str:
        """The scheme whose blocks are computed with; "" when the table is dequantized."""
        return query.scheme if query.scheme and self._ctx.ops.can(op, query) else ""

    def weights(self) -> Sequence[Weight]:
        shape, tied = (self._spec.vocab, self._spec.hidden), self._spec.tie_embeddings
        return (
            Weight(EMBED, shape, instead=HEAD if tied else ""),
            Weight(HEAD, shape, optional=tied),
        )

    def load(self, tensors: Mapping[str, TensorHandle]) -> None:
        read_table = cache(partial(self._read, tensors[EMBED], self._table_scheme))
        own = tensors.get(HEAD)
        tied = own is None or (self._spec.tie_embeddings and self._equal(own, tensors[EMBED]))
        share = f"[{self._start}:{self._start + self._rows}]"
        self._table = self._lookup.pack_named(EMBED + share, read_table)
        shared = self._lookup.packing and self._lookup.packing == self._head.packing
        if tied and shared and self._table_scheme == self._head_scheme:
            self._matrix = self._table
        elif tied and self._table_scheme == self._head_scheme:
            self._matrix = self._head.pack_named(HEAD + share, read_table, None)
        else:
            read_table.cache_clear()
            stored = tensors[EMBED] if tied or own is None else own
            read_head = partial(self._read, stored, self._head_scheme)
            self._matrix = self._head.pack_named(HEAD + share, read_head, None)

    def _equal(self, one: TensorHandle, other: TensorHandle) -> bool:
        import torch

        return torch.equal(self._read(one, ""), self._read(other, ""))

    def held(self) -> Sequence[Any]:
        return self._table, self._matrix

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] -> [T, hidden], scaled where the model scales."""
        if self._ctx.world == 1:
            return self._lookup(token_ids, self._table)
        local = token_ids - self._start
        absent = (local < 0) | (local >= self._rows)
        x = self._lookup(local.masked_fill(absent, 0), self._table)
        return self._ctx.collectives.all_reduce(x.masked_fill(absent.unsqueeze(1), 0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden] -> float32 [R, vocab] on every rank."""
        logits = self._head(hidden, self._matrix)
        if self._ctx.world > 1:
            logits = self._ctx.collectives.all_gather(logits, dim=-1)[:, : self._spec.vocab]
        if self._softcap:
            logits = (logits / self._softcap).tanh_().mul_(self._softcap)
        return logits

    def _read(self, handle: TensorHandle, scheme: str) -> Any:
        """This rank's rows: blocks as they are stored, or values in the compute dtype."""
        import torch

        ctx, vocab = self._ctx, self._spec.vocab
        if scheme:
            return handle.blocks(slice(self._start, self._start + self._rows))
        start, stop = min(self._start, vocab), min(self._start + self._rows, vocab)
        table = torch.empty(self._rows, self._spec.hidden, dtype=ctx.dtype, device=ctx.device)
        table[stop - start :].zero_()
        if stop > start:
            handle.read_into(table[: stop - start], slice(start, stop))
        return table


def rounded(value: float, dtype: str) -> float:
    """The nearest number of a compute dtype (ties to even), without torch."""
    if dtype == "float16":
        return float(struct.unpack("<e", struct.pack("<e", value))[0])
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if dtype == "bfloat16":
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])
