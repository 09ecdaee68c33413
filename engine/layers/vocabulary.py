"""Both ends of a decoder that know the vocabulary: the embedding table and the language model head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        self._scale = spec.embedding_scale
        self._softcap = spec.final_softcap
        dtype = dtype_name(ctx.dtype)
        self._lookup = ctx.ops.bind("embedding", EmbeddingQuery(self._rows, spec.hidden, dtype))
        self._head = ctx.ops.bind("linear", LinearQuery(spec.hidden, self._rows, dtype))
        self._table: Any = None
        self._matrix: Any = None

    def weights(self) -> Sequence[Weight]:
        shape, tied = (self._spec.vocab, self._spec.hidden), self._spec.tie_embeddings
        return (
            Weight(EMBED, shape, instead=HEAD if tied else ""),
            Weight(HEAD, shape, optional=tied),
        )

    def load(self, tensors: Mapping[str, TensorHandle]) -> None:
        import torch

        # What a scale in a buffer of the compute dtype would be: sqrt(hidden) is rounded before it is used.
        self._scale = torch.tensor(self._spec.embedding_scale, dtype=self._ctx.dtype).item()
        table = self._read(tensors[EMBED])
        matrix = self._read(tensors[HEAD]) if HEAD in tensors else table
        if self._spec.tie_embeddings and torch.equal(matrix, table):
            matrix = table
        self._table = self._lookup.pack(table)
        self._matrix = self._head.pack(matrix, None)

    def held(self) -> Sequence[Any]:
        return self._table, self._matrix

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] -> [T, hidden], scaled where the model scales."""
        if self._ctx.world == 1:
            x = self._lookup(token_ids, self._table)
        else:
            local = token_ids - self._start
            absent = (local < 0) | (local >= self._rows)
            x = self._lookup(local.masked_fill(absent, 0), self._table)
            x = self._ctx.collectives.all_reduce(x.masked_fill(absent.unsqueeze(1), 0))
        return x if self._scale == 1.0 else x * self._scale

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden] -> float32 [R, vocab] on every rank."""
        logits = self._head(hidden, self._matrix)
        if self._ctx.world > 1:
            logits = self._ctx.collectives.all_gather(logits, dim=-1)[:, : self._spec.vocab]
        logits = logits.float()
        if self._softcap:
            logits = (logits / self._softcap).tanh_().mul_(self._softcap)
        return logits

    def _read(self, handle: TensorHandle) -> torch.Tensor:
        import torch

        ctx, vocab = self._ctx, self._spec.vocab
        start, stop = min(self._start, vocab), min(self._start + self._rows, vocab)
        if stop - start == self._rows:
            return handle.read(ctx.dtype, slice(start, stop)).to(ctx.device)
        table = torch.zeros(self._rows, self._spec.hidden, dtype=ctx.dtype, device=ctx.device)
        if stop > start:
            table[: stop - start].copy_(handle.read(ctx.dtype, slice(start, stop)))
        return table
