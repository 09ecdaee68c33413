"""Paged attention from PyTorch's CPU operators. Contract: headrace.platforms.attention.

Keys and values of a (block, KV head) lie together, so gathering a sequence is a copy of long runs. One new token for
a request: requests of like length share one batched product, in which a KV head is read once for its group of query
heads. Several new tokens: one request at a time, fused where PyTorch's kernel knows the case, else in bounded pieces.
What depends on the step alone (indices, masks) is made once in `plan` and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from headrace.platforms.attention import PagedAttention
from headrace.platforms.batch import BatchView
from headrace.platforms.cpu.hardware import NATIVE_BF16
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.kv_layout import CANONICAL, KVFormat
from headrace.platforms.queries import AttentionQuery
from headrace.platforms.reference.int8_rows import dequantize, quantize

# Keys of up to this many tokens are widened to float32: bfloat16 products only pay for longer ones.
WIDE_KEYS = 128
# Elements of keys gathered at once, of masks, and of explicit scores: bound the memory of a step.
KEY_BUDGET = 1 << 23
MASK_BUDGET = 1 << 24
SCORE_BUDGET = 1 << 22
# Queries at once under a window: more would look at many keys outside of it.
WINDOW_STEP = 256


class Runs:
    """Where the keys of some sequences lie: (block, KV head) runs of a cache."""

    def __init__(self, blocks: np.ndarray) -> None:
        self.blocks = torch.from_numpy(blocks.astype(np.int64))  # [b, n]
        self._rows: torch.Tensor | None = None
        self._stride = 0

    def rows(self, cache: torch.Tensor) -> torch.Tensor:
        """[b * heads, n]: each run's place in the cache. Equal for all layers of a group, so made once."""
        stride = cache.stride(0) // cache.stride(1)
        if self._rows is None or self._stride != stride:
            heads = torch.arange(cache.shape[1]).view(1, -1, 1)
            self._rows = ((self.blocks * stride).unsqueeze(1) + heads).flatten(0, 1)
            self._stride = stride
        return self._rows


@dataclass(slots=True)
class Decodes:
    """Requests with one new token and a like number of blocks to read."""

    tokens: torch.Tensor | slice  # rows of q
    runs: Runs
    hidden: torch.Tensor | None  # [b, keys] bool: keys that must not be seen
    keys: int


@dataclass(slots=True)
class Piece:
    """Some queries of a prompt and the keys they may see."""

    start: int  # rows of q
    end: int
    low: int  # keys, counted from the first gathered one
    high: int
    visible: torch.Tensor | None  # [end - start, high - low] bool; None = see `causal`
    causal: bool  # square and lower triangular, else everything is visible


@dataclass(slots=True)
class Prompt:
    runs: Runs
    pieces: list[Piece]


@dataclass(slots=True)
class Plan:
    num_tokens: int
    block: torch.Tensor  # [T'] where this step's tokens go
    offset: torch.Tensor
    tokens: torch.Tensor | None  # the T' tokens that are written; None = all
    fresh: torch.Tensor | None  # blocks that are begun and not filled by this step
    decodes: list[Decodes] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)


class TorchAttention(PagedAttention):
    def __init__(self, query: AttentionQuery, runtime: DeviceRuntime) -> None:
        super().__init__(query, runtime)
        self._group = query.q_heads // query.kv_heads
        # what the fused kernel knows nothing of; with values of another size it would hold all scores at once
        unlike = query.head_dim != query.v_head_dim
        self._explicit = bool(query.softcap) or query.sinks or unlike
        # Soft caps let large scores through, for which bfloat16 is too coarse.
        self._narrow = (
            query.dtype == query.kv_dtype == "bfloat16"
            and not query.softcap
            and bool(runtime.info.features & NATIVE_BF16)
        )

    @classmethod
    def kv_formats(cls, query: AttentionQuery) -> Sequence[KVFormat]:
        return (KVFormat(CANONICAL, preference=10, preferred_block_size=32),)

    # -- once a step --------------------------------------------------------------------------------------------------

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> Plan:
        plan = self._plan_write(batch, group)
        size, window = batch.block_size, self.query.window
        starts = batch.query_start_loc_host[: batch.num_reqs + 1]
        lengths = batch.seq_lens_host[: batch.num_reqs]
        table = batch.block_tables_host[group]
        new = np.diff(starts)
        single = np.flatnonzero(new == 1)
        if single.size:
            self._plan_decodes(plan, starts[single], lengths[single], table[single], size)
        for i in np.flatnonzero(new > 1):
            length, start, end = int(lengths[i]), int(starts[i]), int(starts[i + 1])
            base = 0
            if window:
                base = max(0, length - (end - start) - window + 1) // size
            pieces = list(self._pieces(start, end, length, base * size))
            plan.prompts.append(Prompt(Runs(table[i : i + 1, base : -(-length // size)]), pieces))
        return plan

    def _plan_write(self, batch: BatchView, group: int) -> Plan:
        slots = batch.slot_mappings[group]
        tokens = None
        if slots.numel() and int(slots.min()) < 0:
            tokens = (slots >= 0).nonzero().squeeze(1)
            slots = slots[tokens]
        size = batch.block_size
        block, offset = slots // size, slots % size
        begun = block[offset == 0]
        fresh = begun[~torch.isin(begun, block[offset == size - 1])]
        return Plan(batch.num_tokens, block, offset, tokens, fresh if fresh.numel() else None)

    def _plan_decodes(
        self, plan: Plan, rows: np.ndarray, lengths: np.ndarray, table: np.ndarray, size: int
    ) -> None:
        """Requests are grouped by the power of two above their number of blocks: less than half is padding."""
        last = -(-lengths // size)
        first = np.zeros_like(last)
        if self.query.window:
            first = np.maximum(0, lengths - self.query.window) // size
        count = last - first
        bucket = np.ceil(np.log2(count)).astype(np.int64)
        for value in np.unique(bucket):
            inside = np.flatnonzero(bucket == value)
            n = int(count[inside].max())
            # Padding repeats a request's own last block: its contents are finite, whoever owned block 0.
            at = np.minimum(first[inside, None] + np.arange(n), last[inside, None] - 1)
            runs = Runs(np.take_along_axis(table[inside], at, axis=1))
            position = first[inside, None] * size + np.arange(n * size)
            hidden = position >= lengths[inside, None]
            if self.query.window:
                hidden |= position < lengths[inside, None] - self.query.window
            tokens: torch.Tensor | slice = torch.from_numpy(rows[inside].astype(np.int64))
            if len(inside) == rows[inside[-1]] - rows[inside[0]] + 1:
                tokens = slice(int(rows[inside[0]]), int(rows[inside[-1]]) + 1)
            mask = torch.from_numpy(hidden) if hidden.any() else None
            plan.decodes.append(Decodes(tokens, runs, mask, n * size))

    def _pieces(self, start: int, end: int, length: int, base: int) -> Iterator[Piece]:
        """Cut a prompt's queries so that masks and scores stay small. Positions count from `base`."""
        window = self.query.window
        step = MASK_BUDGET // length
        if self._explicit:
            step = SCORE_BUDGET // (self.query.q_heads * length)
        if window:
            step = min(step, max(WINDOW_STEP, window))
        step = max(1, step)
        context = length - base - (end - start)  # gathered keys before the first query
        for low in range(start, end, step):
            high = min(low + step, end)
            first, last = context + low - start, context + high - start  # positions of queries
            key = max(0, first - window + 1) if window else 0
            square = last - key == high - low
            if square and (not window or last - key <= window):
                yield Piece(low, high, key, last, None, True)
                continue
            at, keys = torch.arange(first, last).unsqueeze(1), torch.arange(key, last)
            visible = keys <= at
            if window:
                visible &= keys > at - window
            yield Piece(low, high, key, last, None if bool(visible.all()) else visible, False)

    # -- once a layer -------------------------------------------------------------------------------------------------

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Plan,
    ) -> None:
        if plan.fresh is not None:
            # A padded product multiplies what lies behind a sequence's end by zero: it must not be NaN.
            v_cache.index_fill_(0, plan.fresh, 0)
        if plan.tokens is not None:
            k, v = k[plan.tokens], v[plan.tokens]
        if k_cache.dtype == torch.int8:
            k, v = quantize(k), quantize(v)
        elif k.dtype != k_cache.dtype:
            k, v = k.to(k_cache.dtype), v.to(v_cache.dtype)
        k_cache[plan.block, :, plan.offset] = k
        if not self.query.latent:
            v_cache[plan.block, :, plan.offset] = v

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Plan,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = q.new_empty(q.shape[0], self.query.q_heads, self.query.v_head_dim)
        if plan.num_tokens < q.shape[0]:
            out[plan.num_tokens :].zero_()
        for part in plan.decodes:
            out[part.tokens] = self._decode(q[part.tokens], k_cache, v_cache, part, sinks)
        for prompt in plan.prompts:
            keys, values = self._both(k_cache, v_cache, prompt.runs.rows(k_cache))
            for piece in prompt.pieces:
                span = slice(piece.low, piece.high)
                attend = self._prompt_explicit if self._explicit else self._prompt_fused
                part_q = q[piece.start : piece.end]
                out[piece.start : piece.end] = attend(
                    part_q, keys[:, span], values[:, span], piece, sinks
                )
        return out

    def _decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        part: Decodes,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """q [b, Hq, D] -> [b, Hq, Dv]."""
        heads = k_cache.shape[1]
        rows = part.runs.rows(k_cache)
        sequences = q.shape[0] * heads
        q = q.reshape(sequences, self._group, -1)
        hidden = part.hidden
        if hidden is not None:
            hidden = hidden.unsqueeze(1).expand(-1, heads, -1).reshape(sequences, 1, -1)
        if sinks is not None:
            sinks = sinks.float().view(1, heads, self._group).expand(q.shape[0] // heads, -1, -1)
            sinks = sinks.reshape(sequences, self._group, 1)
        step = max(1, KEY_BUDGET // (part.keys * q.shape[-1]))
        results = []
        for low in range(0, sequences, step):
            cut = slice(low, low + step)
            keys, values = self._both(k_cache, v_cache, rows[cut])
            results.append(
                self._product(
                    q[cut],
                    keys,
                    values,
                    None if hidden is None else hidden[cut],
                    None if sinks is None else sinks[cut],
                )
            )
        result = results[0] if len(results) == 1 else torch.cat(results)
        return result.view(-1, self.query.q_heads, self.query.v_head_dim)

    def _both(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = _gather(k_cache, rows)
        if self.query.latent:
            return keys, keys[..., : self.query.v_head_dim]
        return keys, _gather(v_cache, rows)

    def _product(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        hidden: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """softmax(q k^T) v for q [N, g, D], keys [N, L, D], values [N, L, Dv] -> [N, g, Dv]."""
        dtype = q.dtype
        if not self._narrow or keys.shape[1] <= WIDE_KEYS:
            q, keys, values = q.float(), keys.float(), values.float()
        scores = torch.bmm(q, keys.transpose(1, 2)).float().mul_(self.query.scale)
        weights = self._weights(scores, hidden, sinks)
        return torch.bmm(weights.to(values.dtype), values).to(dtype)

    def _weights(
        self, scores: torch.Tensor, hidden: torch.Tensor | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Softmax of float32 scores, which are overwritten."""
        if self.query.softcap:
            scores.div_(self.query.softcap).tanh_().mul_(self.query.softcap)
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        if sinks is None:
            return torch.softmax(scores, dim=-1)
        return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]

    def _prompt_fused(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        piece: Piece,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """q [n, Hq, D], keys [Hkv, L, D] -> [n, Hq, Dv]."""
        result = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            keys.unsqueeze(0).to(q.dtype),
            values.unsqueeze(0).to(q.dtype),
            attn_mask=piece.visible,
            is_causal=piece.causal,
            scale=self.query.scale,
            enable_gqa=self._group > 1,
        )
        return result.squeeze(0).transpose(0, 1)

    def _prompt_explicit(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        piece: Piece,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same in float32 steps, for soft caps and sinks."""
        n, heads = q.shape[0], keys.shape[0]
        rows = q.view(n, heads, self._group, -1).permute(1, 2, 0, 3)
        rows = rows.reshape(heads, self._group * n, -1).float()
        scores = torch.bmm(rows, keys.float().transpose(1, 2)).mul_(self.query.scale)
        scores = scores.view(heads, self._group, n, -1)
        visible = piece.visible
        if piece.causal:
            visible = torch.ones(n, n, dtype=torch.bool).tril_()
        if sinks is not None:
            sinks = sinks.float().view(heads, self._group, 1, 1).expand(-1, -1, n, -1)
        weights = self._weights(scores, None if visible is None else ~visible, sinks)
        result = torch.bmm(weights.reshape(heads, self._group * n, -1), values.float())
        result = result.view(heads, self._group, n, -1).permute(2, 0, 1, 3)
        return result.reshape(n, self.query.q_heads, -1)


def _gather(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[N, n * S, D] of cache [P, H, S, D]: the n runs of each of N rows put one behind the other; int8 as float32."""
    blocks, heads, size, width = cache.shape
    run, line = cache.stride(1), cache.stride(2)
    count = (blocks - 1) * (cache.stride(0) // run) + heads
    runs = cache.as_strided((count, size * line), (run, 1))
    found = runs.index_select(0, rows.flatten())
    found = found.view(rows.shape[0], rows.shape[1] * size, line)[..., :width]
    return dequantize(found) if cache.dtype == torch.int8 else found
