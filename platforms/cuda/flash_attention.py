"""Paged attention by FlashAttention: version 3 in one call, version 2 in one for decodes and one for prompts.

Contract: headrace.platforms.attention. Keys and values are written by the shared kernel, and the cache is one that the
shared attention reads, too. flash_attention_rows.py says what they can serve, without importing them.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.platforms.batch import BatchView
from headrace.platforms.cuda.flash_attention_rows import BLOCK_SIZES, PAGE
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.graph import GraphSupport
from headrace.platforms.kv_layout import CANONICAL, KVFormat
from headrace.platforms.queries import AttentionQuery
from headrace.platforms.triton.attention import Plan, TritonAttention

# A window is (keys before the query's own, keys behind it); -1 is no limit.
NO_WINDOW = (-1, -1)


def find(module: str, *names: str) -> list[Any]:
    """What a library's module has by these names. ImportError whatever its import throws: the selection then goes on
    to the next implementation."""
    try:
        found = importlib.import_module(module)
        return [getattr(found, name) for name in names]
    except Exception as error:
        raise ImportError(
            f"{module} cannot be imported ({type(error).__name__}: {error})"
        ) from error


@dataclass(slots=True)
class LibraryPlan(Plan):
    """`decodes` of the shared plan is 0: its kernel that turns, writes and attends at once is not to be taken."""

    singles: int = 0  # the first requests, of one query token
    longest_query: int = 1
    longest: int = 1
    own: Any = None  # the library's


class LibraryAttention(TritonAttention):
    """What is the same for all libraries: decodes are captured, rows of padding are zeros."""

    graph = GraphSupport.DECODE_ONE

    def base_plan(self, batch: BatchView, group: int) -> LibraryPlan:
        """A batch of decodes takes its padding rows along, which are decodes of one token."""
        only_decodes = batch.num_decode_reqs == batch.num_reqs
        requests = len(batch.seq_lens) if only_decodes else batch.num_reqs
        return LibraryPlan(
            decodes=0,
            splits=1,
            num_tokens=requests if only_decodes else batch.num_tokens,
            slots=batch.slot_mappings[group],
            seq_lens=batch.seq_lens[:requests],
            starts=batch.query_start_loc[: requests + 1],
            table=batch.block_tables[group][:requests],
            tiles=None,
            block_size=batch.block_size,
            singles=requests if only_decodes else batch.num_decode_reqs,
            longest_query=1 if only_decodes else batch.max_query_len,
            longest=batch.max_seq_len,
        )

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: LibraryPlan,  # type: ignore[override]
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query, count = self.query, plan.num_tokens
        if out is None and 0 < count == q.shape[0]:
            return self.compute(q, k_cache, v_cache, plan, None)
        if out is None:
            out = q.new_empty(q.shape[0], query.q_heads, query.v_head_dim)
        if count < q.shape[0]:
            out[count:].zero_()
        if count:
            self.compute(q[:count], k_cache, v_cache, plan, out[:count])
        return out

    @abstractmethod
    def compute(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: LibraryPlan,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """`attend` without padding, into `out` where it is given."""

    def pinned(self, arrays: Sequence[np.ndarray]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Integers of a plan in one piece of pinned memory: views of each there, and all of them on the device."""
        ends = np.cumsum([len(array) for array in arrays])
        held = self.runtime.pinned_empty((int(ends[-1]),), torch.int32)
        host = held.numpy()
        for end, array in zip(ends, arrays, strict=True):
            host[end - len(array) : end] = array
        views = [held[end - len(a) : end] for end, a in zip(ends, arrays, strict=True)]
        return views, held.to(self.runtime.device, non_blocking=True)


class _FlashAttention(LibraryAttention):
    def __init__(self, query: AttentionQuery, runtime: DeviceRuntime) -> None:
        super().__init__(query, runtime)
        self._options = {
            "softmax_scale": query.scale,
            "causal": True,
            "window_size": (query.window - 1, 0) if query.window else NO_WINDOW,
            "softcap": query.softcap,
        }


class FlashAttention3(_FlashAttention):
    def __init__(self, query: AttentionQuery, runtime: DeviceRuntime) -> None:
        super().__init__(query, runtime)
        (self._call,) = find("flash_attn_interface", "flash_attn_with_kvcache")

    @classmethod
    def kv_formats(cls, query: AttentionQuery) -> Sequence[KVFormat]:
        return (KVFormat(CANONICAL, BLOCK_SIZES, preference=10, preferred_block_size=32),)

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> LibraryPlan:
        """Nothing is copied. Of a batch of decodes the call's size follows from the sizes of tensors only, so that a
        graph replays it for other lengths."""
        return self.base_plan(batch, group)

    def compute(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: LibraryPlan,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = self._call(
            q,
            k_cache.transpose(1, 2),  # tokens before heads, of any strides
            v_cache.transpose(1, 2),
            cache_seqlens=plan.seq_lens,
            page_table=plan.table,
            cu_seqlens_q=plan.starts,
            max_seqlen_q=plan.longest_query,
            **self._options,
        )
        return y if out is None else out.copy_(y)


class FlashAttention2(_FlashAttention):
    def __init__(self, query: AttentionQuery, runtime: DeviceRuntime) -> None:
        super().__init__(query, runtime)
        names = "flash_attn_with_kvcache", "flash_attn_varlen_func"
        self._decode_call, self._prompt_call = find("flash_attn", *names)

    @classmethod
    def kv_formats(cls, query: AttentionQuery) -> Sequence[KVFormat]:
        return (KVFormat(CANONICAL, multiple_of=PAGE, preference=10, preferred_block_size=PAGE),)

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> LibraryPlan:
        """Nothing is copied for decodes. Prompts are counted from the first of them."""
        plan = self.base_plan(batch, group)
        first, last = plan.singles, batch.num_reqs
        if first < last:
            starts = batch.query_start_loc_host[first : last + 1] - first
            keys = np.concatenate([[0], np.cumsum(batch.seq_lens_host[first:last])])
            _, device = self.pinned([starts, keys])
            plan.own = device[: len(starts)], device[len(starts) :]
        return plan

    def compute(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: LibraryPlan,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        caches, singles = (k_cache.transpose(1, 2), v_cache.transpose(1, 2)), plan.singles
        parts: list[torch.Tensor] = []
        if singles:
            y = self._decode_call(
                q[:singles].unsqueeze(1),
                *caches,
                cache_seqlens=plan.seq_lens[:singles],
                block_table=plan.table[:singles],
                **self._options,
            )
            parts.append(y.squeeze(1))
        if plan.own is not None:
            starts, keys = plan.own
            y = self._prompt_call(
                q[singles:],
                *caches,
                cu_seqlens_q=starts,
                cu_seqlens_k=keys,
                max_seqlen_q=plan.longest_query,
                max_seqlen_k=plan.longest,
                block_table=plan.table[singles:],
                **self._options,
            )
            parts.append(y)
        if len(parts) == 1:
            return parts[0] if out is None else out.copy_(parts[0])
        return torch.cat(parts, out=out)
