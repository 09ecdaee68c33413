"""Paged attention by AITER's unified kernel: prompts, chunks and decodes in one call.

Contract: headrace.platforms.attention. Keys and values are written by the shared kernel, and the cache is one
that the shared attention reads, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.platforms.batch import BatchView
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.kv_layout import CANONICAL, KVFormat
from headrace.platforms.queries import AttentionQuery
from headrace.platforms.rocm.aiter import vendor
from headrace.platforms.rocm.aiter.rows import BLOCK_SIZES
from headrace.platforms.triton.attention import Plan, TritonAttention

# AITER's window is (keys before the query's own, keys behind it); -1 is no limit.
NO_WINDOW = (-1, -1)


@dataclass(slots=True)
class UnifiedPlan(Plan):
    longest_query: int = 1
    longest: int = 1  # at least the longest sequence: what a captured call is sized by


class AiterAttention(TritonAttention):
    def __init__(self, query: AttentionQuery, runtime: DeviceRuntime) -> None:
        super().__init__(query, runtime)
        self._call = vendor.find("unified_attention")
        self._window = (query.window - 1, 0) if query.window else NO_WINDOW

    @classmethod
    def kv_formats(cls, query: AttentionQuery) -> Sequence[KVFormat]:
        return (KVFormat(CANONICAL, BLOCK_SIZES, preference=10, preferred_block_size=32),)

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> UnifiedPlan:
        """Nothing is copied. A batch of decodes takes its padding rows along, which are decodes of one token; the
        call's size then follows from the sizes of tensors only, so that a graph replays it for other lengths."""
        table = batch.block_tables[group]
        only_decodes = batch.num_decode_reqs == batch.num_reqs
        requests = len(batch.seq_lens) if only_decodes else batch.num_reqs
        return UnifiedPlan(
            decodes=0,
            splits=1,
            num_tokens=requests if only_decodes else batch.num_tokens,
            slots=batch.slot_mappings[group],
            seq_lens=batch.seq_lens[:requests],
            starts=batch.query_start_loc[: requests + 1],
            table=table[:requests],
            tiles=None,
            block_size=batch.block_size,
            longest_query=1 if only_decodes else batch.max_query_len,
            longest=table.shape[1] * batch.block_size if only_decodes else batch.max_seq_len,
        )

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: UnifiedPlan,  # type: ignore[override]
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query = self.query
        if out is None:
            out = torch.empty(
                q.shape[0], query.q_heads, query.head_dim, dtype=q.dtype, device=q.device
            )
        if plan.num_tokens < q.shape[0]:
            out[plan.num_tokens :].zero_()
        if plan.num_tokens:
            self._call(
                q=q[: plan.num_tokens],
                k=k_cache.transpose(1, 2),  # AITER has tokens before heads, of any strides
                v=v_cache.transpose(1, 2),
                out=out[: plan.num_tokens],
                cu_seqlens_q=plan.starts,
                max_seqlen_q=plan.longest_query,
                seqused_k=plan.seq_lens,
                max_seqlen_k=plan.longest,
                softmax_scale=query.scale,
                causal=True,
                window_size=self._window,
                block_table=plan.table,
                softcap=query.softcap,
                q_descale=None,
                k_descale=None,
                v_descale=None,
                sinks=sinks,
            )
        return out


def attention_of(query: AttentionQuery, runtime: DeviceRuntime) -> TritonAttention:
    """The implementation for the query."""
    if query.latent:
        from headrace.platforms.rocm.aiter.mla import AiterMLA

        return AiterMLA(query, runtime)
    return AiterAttention(query, runtime)
