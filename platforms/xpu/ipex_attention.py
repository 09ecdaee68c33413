"""Paged attention of Intel's extension for PyTorch. Contract: headrace.platforms.attention.

Called through `ipex.llm.modules.PagedAttention`, which picks the device's kernels: XeTLA's on GPUs, oneDNN's and its
own on CPUs. Signatures and limits: releases 2.8.0 (CPU) and 2.8.10 (XPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from intel_extension_for_pytorch.llm.modules import PagedAttention as Kernels

from headrace.platforms.attention import PagedAttention
from headrace.platforms.batch import BatchView
from headrace.platforms.graph import GraphSupport
from headrace.platforms.kv_layout import KVFormat, Layout
from headrace.platforms.queries import AttentionQuery

# The keys of all blocks lie together, then the values; a block is [tokens, heads, head size]. The kernels want each
# of the two caches contiguous.
LAYOUT: Layout = ("K", "P", "S", "H", "D")
BLOCK_SIZES = (64, 128)  # for which the kernels that read pages are built


@dataclass(slots=True)
class Plan:
    tokens: int  # padding rows of a graph's step included: they read the dummy block
    slots: torch.Tensor
    starts_q: torch.Tensor  # [B+1] int32: where each request's queries begin
    starts_k: torch.Tensor  # [B+1] int32: the running sum of context lengths
    longest_q: int
    longest_k: int
    table: torch.Tensor


class IpexAttention(PagedAttention):
    # the longest lengths of a step are arguments that choose the kernel, so a captured call serves no other step
    graph = GraphSupport.NEVER

    @classmethod
    def kv_formats(cls, query: AttentionQuery) -> Sequence[KVFormat]:
        return (KVFormat(LAYOUT, block_sizes=BLOCK_SIZES, preference=20, preferred_block_size=64),)

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> Plan:
        lengths = batch.seq_lens_host
        starts = self.runtime.pinned_empty((len(lengths) + 1,), torch.int32)
        host = starts.numpy()
        host[0] = 0
        np.cumsum(lengths, out=host[1:])
        return Plan(
            int(batch.query_start_loc_host[-1]),
            batch.slot_mappings[group],
            batch.query_start_loc,
            starts.to(self.runtime.device, non_blocking=True),
            int(np.diff(batch.query_start_loc_host).max()),
            int(lengths.max()),
            batch.block_tables[group].contiguous(),
        )

    @staticmethod
    def pages(cache: torch.Tensor) -> torch.Tensor:
        """A cache [P, H, S, D] with its axes in the order that the kernels read."""
        return cache.transpose(1, 2)

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Plan,
    ) -> None:
        if k.shape[0]:
            # heads and sizes must be dense; tokens may lie apart, as slices of a joint projection do
            k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (k, v))
            Kernels.reshape_and_cache_flash(
                k, v, self.pages(k_cache), self.pages(v_cache), plan.slots
            )

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Plan,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query = self.query
        result = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan.tokens < q.shape[0]:
            result[plan.tokens :].zero_()
        Kernels.flash_attn_varlen_func(
            result[: plan.tokens],
            q[: plan.tokens].contiguous(),
            self.pages(k_cache),
            self.pages(v_cache),
            plan.starts_q,
            plan.starts_k,
            plan.longest_q,
            plan.longest_k,
            query.scale,
            True,
            plan.table,
            None,
            window_size_left=query.window - 1
            if query.window
            else -1,  # keys before the query's own
            window_size_right=0 if query.window else -1,
            softcap=query.softcap or -1.0,
        )
        return result if out is None else out.copy_(result)
