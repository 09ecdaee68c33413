"""Paged attention, one request at a time, in float32. Contract: headrace.platforms.attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.platforms.attention import PagedAttention
from headrace.platforms.batch import BatchView
from headrace.platforms.kv_layout import CANONICAL, KVFormat
from headrace.platforms.queries import AttentionQuery
from headrace.platforms.reference.int8_rows import dequantize, quantize

# Scores of one block of queries, in elements: bounds memory at long contexts (64 MiB).
SCORE_BUDGET = 1 << 24
E4M3_MOST = 448.0  # the largest number of float8_e4m3fn, which has no infinity


@dataclass(slots=True)
class Plan:
    num_reqs: int
    num_tokens: int
    starts: list[int]  # [B+1]
    seq_lens: list[int]  # [B]
    block_table: torch.Tensor  # [B, P] int64
    tokens: torch.Tensor  # tokens of this step that are written
    slots: torch.Tensor  # and where: block * block_size + offset


class ReferenceAttention(PagedAttention):
    @classmethod
    def kv_formats(cls, query: AttentionQuery) -> Sequence[KVFormat]:
        return (KVFormat(CANONICAL, preference=0),)

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> Plan:
        slots = batch.slot_mappings[group]
        tokens = (slots >= 0).nonzero().squeeze(1)
        return Plan(
            batch.num_reqs,
            batch.num_tokens,
            batch.query_start_loc_host.tolist(),
            batch.seq_lens_host.tolist(),
            batch.block_tables[group].long(),
            tokens,
            slots[tokens],
        )

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Plan,
    ) -> None:
        size = k_cache.shape[2]
        block, offset = plan.slots // size, plan.slots % size
        for new, cache in ((k[plan.tokens], k_cache), (v[plan.tokens], v_cache)):
            if cache.dtype == torch.int8:
                new = quantize(new)
            elif cache.dtype == torch.float8_e4m3fn:
                new = new.clamp(-E4M3_MOST, E4M3_MOST)
            cache[block, :, offset] = new.to(cache.dtype)  # twice the same numbers if latent

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
        out[plan.num_tokens :].zero_()
        for i in range(plan.num_reqs):
            start, end, length = plan.starts[i], plan.starts[i + 1], plan.seq_lens[i]
            keys = self._gather(k_cache, plan.block_table[i], length)
            values = self._gather(v_cache, plan.block_table[i], length)
            step = max(1, SCORE_BUDGET // (self.query.q_heads * length))
            for low in range(start, end, step):
                high = min(low + step, end)
                first = length - end + low  # position of the block's first query
                out[low:high] = self._dense(q[low:high], keys, values, first, sinks)
        return out

    def _gather(self, cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
        """[Hq, length, D] float32 of one request; each KV head repeated for its group of query heads, but [length, D]
        of a single one."""
        size = cache.shape[2]
        rows = cache[blocks[: -(-length // size)]]  # [n, Hkv, S, D]
        rows = dequantize(rows) if cache.dtype == torch.int8 else rows.float()
        heads = rows.transpose(0, 1).flatten(1, 2)[:, :length]
        if self.query.kv_heads == 1:
            return heads[0]
        return heads.repeat_interleave(self.query.q_heads // self.query.kv_heads, dim=0)

    def _dense(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        first: int,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """q [n, Hq, D] at positions first..first+n-1 over keys [Hq, L, D] or [L, D] -> [n, Hq, Dv]."""
        scores = torch.matmul(q.transpose(0, 1).float(), keys.mT) * self.query.scale
        if self.query.softcap:
            scores = self.query.softcap * torch.tanh(scores / self.query.softcap)
        position = torch.arange(first, first + q.shape[0], device=q.device).unsqueeze(1)
        key = torch.arange(keys.shape[-2], device=q.device)
        hidden = key > position
        if self.query.window:
            hidden |= key <= position - self.query.window
        scores.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.float().view(-1, 1, 1).expand(-1, q.shape[0], 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : keys.shape[-2]]
        return torch.matmul(weights, values).transpose(0, 1).to(q.dtype)
