"""Paged attention whose decode steps can be captured; everything else is the reference's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.platforms.batch import BatchView
from headrace.platforms.graph import GraphSupport
from headrace.platforms.reference.attention import ReferenceAttention


@dataclass(slots=True)
class Decodes:
    slots: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor


class SimAttention(ReferenceAttention):
    graph = GraphSupport.DECODE_ONE

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> Any:
        if batch.num_decode_reqs < batch.num_reqs:
            return super().plan(batch, group, static)
        return Decodes(batch.slot_mappings[group], batch.block_tables[group], batch.seq_lens)

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Any,
    ) -> None:
        if not isinstance(plan, Decodes):
            return super().write(k, v, k_cache, v_cache, plan)
        size = k_cache.shape[2]
        slots = plan.slots.clamp(min=0)  # padding goes to the dummy block
        k_cache[slots // size, :, slots % size] = k.to(k_cache.dtype)
        v_cache[slots // size, :, slots % size] = v.to(v_cache.dtype)
        return None

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Any,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not isinstance(plan, Decodes):
            return super().attend(q, k_cache, v_cache, plan, out, sinks)
        query = self.query
        position = torch.arange(plan.table.shape[1] * k_cache.shape[2], device=q.device)
        last = plan.seq_lens.unsqueeze(1) - 1
        seen = position <= last
        if query.window:
            seen = seen & (position > last - query.window)
        keys, values = (self._rows(cache, plan.table, seen) for cache in (k_cache, v_cache))
        scores = torch.einsum("bhd,bhkd->bhk", q.float(), keys) * query.scale
        if query.softcap:
            scores = query.softcap * torch.tanh(scores / query.softcap)
        scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
        if sinks is not None:
            column = sinks.float().view(1, -1, 1).expand(len(q), -1, 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
        result = torch.einsum("bhk,bhkd->bhd", weights, values).to(q.dtype)
        return result if out is None else out.copy_(result)

    def _rows(self, cache: torch.Tensor, table: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """[B, Hq, P * S, D] float32; what is not seen is 0, as a weight of zero must not meet NaN."""
        rows = cache[table.long()].transpose(1, 2).flatten(2, 3).float()
        rows = torch.where(seen[:, None, :, None], rows, 0.0)
        return rows.repeat_interleave(self.query.q_heads // self.query.kv_heads, dim=1)
