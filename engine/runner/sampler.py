"""From logits to tokens: penalties, bias and masks, the sampling op, log-probabilities.

Order: penalties on the model's logits, then logit_bias is added, then the stop ids of rows below min_tokens are
masked, then temperature and the filters inside the op. Log-probabilities always come from the raw logits.
Every row is treated alone: no result depends on batch mates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from headrace.engine.core.step import TokenLogprobs
from headrace.engine.runner.batch import SampleInputs
from headrace.engine.runner.rows import Rows
from headrace.engine.runner.staging import Transfers

# Elements of one [rows, V] or [rows, L] slice: bounds the memory of ops that make several copies of it.
SLICE_ELEMENTS = 1 << 23

SampleOp = Callable[..., torch.Tensor]

# Contract "logprobs" (platforms/ops.py)
LogprobsOp = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """What a step does with logits, bound for one vocabulary (contracts of these names in platforms/ops.py)."""

    sample: SampleOp
    logprobs: LogprobsOp
    penalties: Callable[..., None]


@dataclass(slots=True)
class HostLogprobs:
    """Numbers of N positions on their way to the host; `k[i]` candidates were asked for at position i."""

    k: np.ndarray  # [N]
    token_ids: torch.Tensor  # [N] int64
    logprobs: torch.Tensor  # [N] float32
    ranks: torch.Tensor  # [N] int64
    top_ids: torch.Tensor  # [N, max k] int64
    top_logprobs: torch.Tensor  # [N, max k] float32

    def entries(self) -> list[TokenLogprobs]:
        """Valid once the copies are complete."""
        columns = (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        return [
            TokenLogprobs(token, logprob, rank, ids[:k], values[:k])
            for k, token, logprob, rank, ids, values in zip(
                self.k.tolist(), *(column.tolist() for column in columns), strict=True
            )
        ]


class Sampler:
    def __init__(self, rows: Rows, ops: SamplingOps, transfers: Transfers) -> None:
        self._rows = rows
        self.logprobs_op = ops.logprobs
        self._penalties = ops.penalties
        self._sample = ops.sample
        self._fast_greedy = getattr(ops.sample, "fast_greedy", False)
        self._guarded = getattr(ops.sample, "guarded", None)
        self.capturable = self._guarded is not None  # `unshaped` may be part of a graph
        self._transfers = transfers

    def unshaped(self, raw: torch.Tensor, inputs: SampleInputs) -> torch.Tensor:
        """As `sample`, of rows that ask for no change of their logits; the host decides nothing."""
        assert self._guarded is not None
        ids: torch.Tensor = self._guarded(raw, *options(inputs, len(raw)), False)
        return ids

    def sample(self, raw: torch.Tensor, inputs: SampleInputs) -> torch.Tensor:
        """raw logits [R, V] float32, kept -> ids [R] int32; -1 where a row's logits are not finite."""
        logits = self._shape(raw, inputs)
        if self._guarded and logits is raw:
            return self._guarded(raw, *options(inputs, len(raw)), inputs.greedy)
        plain = inputs.greedy and not self._fast_greedy
        ids = logits.argmax(-1) if plain else self._draw(logits, inputs)
        # A sum is finite only if every term is: one pass, no [R, V] temporary.
        return torch.where(raw.sum(-1).isfinite(), ids, -1).to(torch.int32)

    def _draw(self, logits: torch.Tensor, inputs: SampleInputs) -> torch.Tensor:
        count, vocab = logits.shape
        # an op that marks rows on its way makes no copies of them
        step = count if self._guarded else max(1, SLICE_ELEMENTS // vocab)
        asked = options(inputs, count)
        parts = [
            self._sample(logits[low : low + step], *(a[low : low + step] for a in asked))
            for low in range(0, count, step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _shape(self, raw: torch.Tensor, inputs: SampleInputs) -> torch.Tensor:
        """The logits to sample from: `raw` itself when no row asks for a change, else a changed copy."""
        shaped = np.flatnonzero(self._rows.shaped[inputs.rows])
        if not len(shaped):
            return raw
        logits, rows = raw.clone(), inputs.rows
        penalised = shaped[self._rows.penalised[rows[shaped]]]
        if len(penalised):
            self._penalise(logits, penalised, inputs)
        biased = shaped[self._rows.biased[rows[shaped]]]
        if len(biased):
            extras = [self._rows.extras[row] for row in rows[biased].tolist()]
            where, ids, bias = self._transfers.send(
                np.repeat(biased, [len(extra.bias_ids) for extra in extras]),
                np.concatenate([extra.bias_ids for extra in extras]),
                np.concatenate([extra.bias for extra in extras]),
            )
            logits[where, ids] += bias
        outputs = inputs.positions - self._rows.prompt_len[rows]
        early = shaped[(outputs < self._rows.min_tokens[rows])[shaped]]
        stops = [self._rows.extras[row].stop_ids for row in rows[early].tolist()]
        lengths = [len(ids) for ids in stops]
        if any(lengths):
            # a number of Python's would be copied to the device by the host, which waits for that
            never = np.full(sum(lengths), -np.inf, np.float32)
            where, ids, bias = self._transfers.send(
                np.repeat(early, lengths), np.concatenate(stops), never
            )
            logits[where, ids] = bias
        return logits

    def _penalise(self, logits: torch.Tensor, which: np.ndarray, inputs: SampleInputs) -> None:
        """In place on rows `which`. Counts are taken anew from the token pool: nothing to keep in step."""
        rows, lengths = inputs.rows[which], inputs.positions[which]
        step = max(1, SLICE_ELEMENTS // max(int(lengths.max()), logits.shape[1]))
        sequences = np.stack((which, rows, self._rows.prompt_len[rows], lengths), -1)
        sent = self._transfers.send(sequences.astype(np.int64), self._rows.factors[rows])
        for low in range(0, len(which), step):
            longest = int(lengths[low : low + step].max())
            part = (column[low : low + step] for column in sent)
            self._penalties(logits, self._rows.tokens, *part, longest)

    def logprobs(
        self, raw: torch.Tensor, ids: torch.Tensor, inputs: SampleInputs
    ) -> tuple[np.ndarray, HostLogprobs] | None:
        """Of the sampled ids [R], for the rows that ask: their indices in the plan, and the numbers."""
        k = self._rows.logprobs[inputs.rows]
        asked = np.flatnonzero(k >= 0)
        if not len(asked):
            return None
        if len(asked) < len(raw):  # it may be padded
            (where,) = self._transfers.send(asked)
            raw, ids = raw[where], ids[where]
        numbers = score(self.logprobs_op, raw, ids.clamp(min=0), int(k[asked].max()))
        return inputs.index[asked], self.to_host(k[asked], numbers)

    def to_host(self, k: np.ndarray, numbers: tuple[torch.Tensor, ...]) -> HostLogprobs:
        return HostLogprobs(k, *(self._transfers.fetch(tensor) for tensor in numbers))


def options(inputs: SampleInputs, count: int) -> tuple[torch.Tensor, ...]:
    """Of the first rows, in the order in which the op takes them."""
    found = (inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.uniform)
    return found if len(found[0]) == count else tuple(option[:count] for option in found)


def score(op: LogprobsOp, raw: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    """raw logits [N, V], ids [N] -> (ids, log-probability, rank, top ids [N, k], top log-probabilities [N, k])."""
    ids = ids.long()
    return ids, *op(raw, ids, min(k, raw.shape[1]))
