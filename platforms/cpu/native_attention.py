"""Paged attention on the native kernels. Contract: headrace.platforms.attention.

The KV cache is packed for the vector unit (native/abi.h, hr_kv_write): each (block, KV head) run of S x D elements, and
of the scales behind it, is the library's own, so the views' inner order means nothing to others. bfloat16 caches of
bfloat16 queries, and int8 ones, are multiplied by bfloat16 dot products; all others are widened to float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.platforms.attention import PagedAttention
from headrace.platforms.batch import BatchView
from headrace.platforms.cpu import kernels as native
from headrace.platforms.cpu.kernels import DTYPES, Kernels
from headrace.platforms.graph import GraphSupport
from headrace.platforms.kv_layout import CANONICAL, KVFormat
from headrace.platforms.queries import AttentionQuery

_KV_WRITE, _ATTENTION = native.OPS.index("kv_write"), native.OPS.index("attention")
QUERY_ROWS = 32  # native/attention.h, kQueryRows
LONG = 1024  # keys from which one sequence is worth cutting up


@dataclass(slots=True)
class Plan:
    num_decode: int
    num_reqs: int
    splits: int
    tasks: int
    prefill: torch.Tensor | None  # [tasks, 2] int32: request, first query
    last_slot: int  # that a prompt's step writes
    start: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor


class NativeAttention(PagedAttention):
    graph = GraphSupport.DECODE_ONE

    def __init__(self, query: AttentionQuery, runtime: Any) -> None:
        super().__init__(query, runtime)
        self._kernels: Kernels = runtime.kernels()
        self._pages = runtime.pages
        self._step = max(QUERY_ROWS // (query.q_heads // query.kv_heads), 1)

    @classmethod
    def kv_formats(cls, query: AttentionQuery) -> Sequence[KVFormat]:
        packing = "pairs" if _in_pairs(query) else "columns"
        return (
            KVFormat(
                CANONICAL,
                multiple_of=16,
                preference=20,
                preferred_block_size=32,
                packing=packing,
            ),
        )

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> Plan:
        starts, count = batch.query_start_loc_host, batch.num_reqs
        if static is not None:  # a captured decode step: every row of the padded batch is one
            count = len(batch.seq_lens_host)
            decodes = count
        else:
            single = np.diff(starts[: count + 1]) == 1
            decodes = int(np.argmin(single)) if not single.all() else count
        tasks, prefill, last_slot = 0, None, 0
        if decodes < count:
            pairs = [
                (row, first)
                for row in range(decodes, count)
                for first in range(0, int(starts[row + 1] - starts[row]), self._step)
            ]
            tasks = len(pairs)
            prefill = torch.tensor(pairs, dtype=torch.int32)
            last_slot = int(batch.slot_mappings[group].max())
        work = decodes * self.query.kv_heads
        threads = self._kernels.threads
        splits = 1
        if decodes and work < 2 * threads and (static is not None or batch.max_seq_len >= 128):
            splits = -(-2 * threads // work)
        return Plan(
            decodes,
            count,
            splits,
            tasks,
            prefill,
            last_slot,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_tables[group],
            batch.slot_mappings[group],
        )

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Plan,
    ) -> None:
        if plan.tasks:
            block = plan.last_slot // k_cache.shape[2] + 1
            self._pages.used(k_cache.data_ptr(), block * k_cache.stride(0) * k_cache.itemsize)
        self._kernels.run(
            _KV_WRITE,
            native.KvWrite(
                k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
                plan.slots.data_ptr(), k.stride(0), v.stride(0), k_cache.stride(0),
                min(k.shape[0], plan.slots.shape[0]), k.shape[1], k.shape[2], k_cache.shape[2],
                DTYPES[k.dtype], DTYPES[k_cache.dtype],
            ),
        )  # fmt: skip

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Plan,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kernels, query = self._kernels, self.query
        if out is None:
            out = kernels.empty((q.shape[0], query.q_heads, query.head_dim), q.dtype)
        table = plan.table
        args = native.Attention(
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(),
            plan.start.data_ptr(), plan.lengths.data_ptr(), table.data_ptr(),
            None if sinks is None else sinks.data_ptr(), 0,
            q.stride(0), out.stride(0), k_cache.stride(0), table.stride(0),
            plan.num_decode, plan.num_reqs, query.q_heads, query.kv_heads, query.head_dim,
            k_cache.shape[2], DTYPES[q.dtype], DTYPES[k_cache.dtype], query.window, plan.splits, plan.tasks,
            None if plan.prefill is None else plan.prefill.data_ptr(), query.scale, query.softcap,
        )  # fmt: skip
        if plan.splits > 1:
            size = kernels.library.hr_attention_scratch(native.byref(args))
            args.scratch = kernels.scratch("attention", size)
        kernels.run(_ATTENTION, args)
        return out

    def canonical(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, heads, size = k_cache.shape[:3]
        width = self.query.head_dim
        shape = (blocks, heads, size, width)
        k_run, v_run = (
            k_cache.flatten(2),
            v_cache.flatten(2),
        )  # numbers, then scales if there are any
        k, v = k_run[..., : size * width], v_run[..., : size * width]
        if _in_pairs(self.query):  # K [.., D/2, S, 2], V [.., S/2, D, 2]
            k = k.reshape(blocks, heads, width // 2, size, 2).transpose(2, 3)
            v = v.reshape(blocks, heads, size // 2, width, 2).transpose(3, 4)
        else:  # K [.., D, S], V [.., S, D]
            k = k.reshape(blocks, heads, width, size).transpose(2, 3)
        k, v = k.reshape(shape), v.reshape(shape)
        if k_cache.dtype == torch.int8:
            k, v = (
                torch.cat([x, run[..., size * width :].reshape(blocks, heads, size, 4)], dim=-1)
                for x, run in ((k, k_run), (v, v_run))
            )
        return k, v


def _in_pairs(query: AttentionQuery) -> bool:
    """native/ops.h, in_pairs"""
    return query.dtype == "bfloat16" and query.kv_dtype in ("bfloat16", "int8")
