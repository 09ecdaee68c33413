"""Paged attention by FlashInfer: one wrapper for decodes, one for prompts and what is mixed with them.

Contract: headrace.platforms.attention. Keys and values are written by the shared kernel, and the cache is one that the
shared attention reads, too. Its `plan` divides the work on the host, into memory that its kernels read: it belongs to
the next calls alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch

from headrace.platforms.batch import BatchView
from headrace.platforms.cuda.flash_attention import LibraryAttention, LibraryPlan, find
from headrace.platforms.device import DeviceRuntime, Event
from headrace.platforms.kv_layout import CANONICAL, KVFormat
from headrace.platforms.queries import AttentionQuery

# For partial results of split sequences, which no two layers have at once. The package asks for 128 MiB and says so
# when many long prompts need more.
WORKSPACE_BYTES = 384 << 20
INTEGER_BYTES = 8 << 20  # for the division of one step's work, as much as the package itself takes

_workspaces: WeakValueDictionary[torch.device, torch.Tensor] = WeakValueDictionary()


@dataclass(slots=True)
class _Wrapper:
    """One of the package's wrappers. It writes a plan into pinned memory of its own, which the device may still be
    about to read when the next one is made."""

    call: Any
    read: Event


class FlashInferAttention(LibraryAttention):
    def __init__(self, query: AttentionQuery, runtime: DeviceRuntime) -> None:
        super().__init__(query, runtime)
        names = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"
        self._of_prompts, self._of_decodes = find("flashinfer", *names)
        self._workspace = _workspace(runtime.device)
        # The kernels of sm_90 are slower for few queries, where the package takes the older ones. On later devices it
        # would ask other libraries.
        self._backend = "auto" if runtime.info.arch == "sm_90" else "fa2"
        kv_dtype = {"fp8_e4m3": "float8_e4m3fn"}.get(query.kv_dtype, query.kv_dtype)
        self._options = {
            "window_left": query.window - 1,  # keys before the query's own; -1: all of them
            "logits_soft_cap": query.softcap,
            "sm_scale": query.scale,
            "q_data_type": getattr(torch, query.dtype),
            "kv_data_type": getattr(torch, kv_dtype),
        }
        # of steps that are not captured, by group and kind; of captured ones, by their static buffers
        self._eager: dict[tuple[int, bool], _Wrapper] = {}
        self._captured: WeakKeyDictionary[Any, _Wrapper] = WeakKeyDictionary()
        self._integers: dict[int, torch.Tensor] = {}  # a group's wrappers take turns
        self._current: dict[int, object] = {}  # what a group's integers belong to

    @classmethod
    def kv_formats(cls, query: AttentionQuery) -> Sequence[KVFormat]:
        return (KVFormat(CANONICAL, preference=10, preferred_block_size=32),)

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> LibraryPlan:
        """Waits until the device has read the last plan of its kind: there is a step between them by then."""
        plan = self.base_plan(batch, group)
        requests, size, query = len(plan.seq_lens), batch.block_size, self.query
        only_decodes = plan.singles == requests
        if static is not None and only_decodes:
            wrapper = self._fixed(static, group, requests, plan.table.shape[1])
        else:
            wrapper = self._wrapper(group, only_decodes)
        lengths = batch.seq_lens_host[:requests]
        counts = -(-lengths // size)
        blocks = batch.block_tables_host[group][:requests]
        used = blocks[np.arange(blocks.shape[1]) < counts[:, None]]
        ends = np.concatenate([[0], np.cumsum(counts)])
        starts = batch.query_start_loc_host[: requests + 1]
        # what is read on the host is given there, what only the kernels read on the device
        (_, *host), device = self.pinned([used, ends, (lengths - 1) % size + 1, starts])
        pages = host[0], device[: len(used)], host[1]
        shape = query.q_heads, query.kv_heads, query.head_dim, size
        wrapper.read.synchronize()
        if only_decodes:
            wrapper.call.plan(*pages, *shape, **self._options)
        else:
            wrapper.call.plan(host[2], *pages, *shape, causal=True, **self._options)
        wrapper.read.record()
        self._current[group] = plan.own = (wrapper, group)
        return plan

    def compute(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: LibraryPlan,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        wrapper, group = plan.own
        if self._current.get(group) is not plan.own:
            raise RuntimeError("FlashInfer's plan was overwritten by a later one; plan again")
        own = out
        if own is None or not own.is_contiguous():
            own = q.new_empty(q.shape[0], self.query.q_heads, self.query.v_head_dim)
        wrapper.call.run(q, (k_cache, v_cache), out=own)
        return own if out is None or own is out else out.copy_(own)

    def _wrapper(self, group: int, decodes: bool) -> _Wrapper:
        found = self._eager.get((group, decodes))
        if found is None:
            if decodes:
                options: dict[str, Any] = {"use_tensor_cores": True, "backend": "fa2"}
                call = self._of_decodes(self._workspace, "HND", **options)
            else:
                call = self._of_prompts(self._workspace, "HND", backend=self._backend)
            found = self._eager[group, decodes] = self._made(call, group)
        return found

    def _fixed(self, static: Any, group: int, requests: int, columns: int) -> _Wrapper:
        """For decodes of so many requests with tables of so many blocks, whose plans have fixed addresses."""
        found = self._captured.get(static)
        if found is None:
            call = self._of_decodes(
                self._workspace,
                "HND",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=static.get("ends", (requests + 1,), torch.int32),
                paged_kv_indices_buffer=static.get("blocks", (requests * columns,), torch.int32),
                paged_kv_last_page_len_buffer=static.get("last", (requests,), torch.int32),
                backend="fa2",
            )
            found = self._captured[static] = self._made(call, group)
        return found

    def _made(self, call: Any, group: int) -> _Wrapper:
        if group not in self._integers:
            self._integers[group] = torch.empty(
                INTEGER_BYTES, dtype=torch.uint8, device=self.runtime.device
            )
        call.reset_workspace_buffer(self._workspace, self._integers[group])
        return _Wrapper(call, self.runtime.event())


def _workspace(device: torch.device) -> torch.Tensor:
    """One of each device, for as long as an instance has it."""
    found = _workspaces.get(device)
    if found is None:
        found = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        _workspaces[device] = found
    return found
