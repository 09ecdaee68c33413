"""Multi-head latent attention by AITER: its decode kernel with split keys, and its prefill kernel for prompts and
chunks. Contract: headrace.platforms.attention, for queries with `latent`.

Both know pages of one token only in the released package, so each token's slot is listed. Rows are written by the
shared kernel, and the cache is one that the shared attention reads, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.platforms.batch import BatchView
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.graph import GraphSupport
from headrace.platforms.queries import AttentionQuery
from headrace.platforms.rocm.aiter import vendor
from headrace.platforms.triton.attention import Plan
from headrace.platforms.triton.mla import TritonMLA

# Slots behind the last one that are there to be read, as in the package's own tests.
SLACK = 10_000


@dataclass(slots=True)
class Part:
    """Requests that one call serves: the decodes, or the prompts and chunks."""

    tokens: slice  # rows of q
    longest: int  # most query tokens of a request
    starts: torch.Tensor  # [n + 1] int32: each one's rows of q, counted from the first
    ends: torch.Tensor  # [n + 1] int32: each one's slots
    slots: torch.Tensor  # int32
    ones: torch.Tensor  # [n] int32: tokens in the last page


@dataclass(slots=True)
class LatentPlan(Plan):
    parts: list[Part] = field(default_factory=list)
    fixed: bool = False  # its tensors have fixed addresses: it may be captured


class AiterMLA(TritonMLA):
    graph = GraphSupport.DECODE_ONE
    reads_tables = True

    def __init__(self, query: AttentionQuery, runtime: DeviceRuntime) -> None:
        super().__init__(query, runtime)
        self._decode_call = vendor.find("mla_decode")
        self._prefill_call = vendor.find("mla_prefill")
        self._splits_of = vendor.find("mla_splits")
        self._kept: dict[int, Any] = {}

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> LatentPlan:
        table = batch.block_tables[group]
        only_decodes = batch.num_decode_reqs == batch.num_reqs
        # padding rows are decodes of one token
        requests = len(batch.seq_lens) if only_decodes else batch.num_reqs
        decodes = requests if only_decodes else batch.num_decode_reqs
        made = LatentPlan(
            decodes=decodes,
            splits=1,
            num_tokens=requests if only_decodes else batch.num_tokens,
            slots=batch.slot_mappings[group],
            seq_lens=batch.seq_lens,
            starts=batch.query_start_loc,
            table=table,
            tiles=None,
            block_size=batch.block_size,
            fixed=static is not None,
        )
        if decodes:
            made.parts.append(_part(batch, table, slice(0, decodes), static))
        if requests > decodes:
            made.parts.append(_part(batch, table, slice(decodes, requests), None))
        return made

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: LatentPlan,  # type: ignore[override]
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query = self.query
        if out is None:
            shape = (q.shape[0], query.q_heads, query.v_head_dim)
            out = torch.empty(shape, dtype=q.dtype, device=q.device)
        if plan.num_tokens < q.shape[0]:
            out[plan.num_tokens :].zero_()
        pages = k_cache.transpose(1, 2).reshape(-1, 1, 1, query.head_dim)
        for part in plan.parts:
            given = out[part.tokens]
            own = given if given.is_contiguous() else given.contiguous()
            call = self._decode_call if part.longest == 1 else self._prefill_call
            if part.longest == 1 and plan.fixed:
                self._keep_splits(part, q.dtype)
            call(
                q[part.tokens].contiguous(),
                pages,
                own,
                part.starts,
                part.ends,
                part.slots,
                part.ones,
                part.longest,
                sm_scale=query.scale,
            )
            if own is not given:
                given.copy_(own)
        return out

    def _keep_splits(self, part: Part, dtype: torch.dtype) -> None:
        """AITER makes a tensor that says where sequences are split and forgets it when another is wanted; a graph reads
        it at every replay. This is the one that its call, which asks with the same arguments, is given."""
        sizes = (len(part.ones), len(part.slots), self.query.q_heads, part.longest)
        made = self._splits_of(None, *sizes, dtype)[-1]
        self._kept[id(made)] = made


def _part(batch: BatchView, table: torch.Tensor, rows: slice, static: Any | None) -> Part:
    device, size = table.device, batch.block_size
    count = rows.stop - rows.start
    lengths, table = batch.seq_lens[rows], table[rows]
    host = batch.query_start_loc_host
    first, stop = int(host[rows.start]), int(host[rows.stop])
    used = int(batch.seq_lens_host[rows].sum())
    ends = torch.zeros(count + 1, dtype=torch.int32, device=device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=ends[1:])
    at = torch.arange(used, dtype=torch.int32, device=device)
    request = torch.searchsorted(ends[1:], at, right=True)
    within = at - ends[request]
    found = table[request, within // size] * size + within % size
    total = used if static is None else count * table.shape[1] * size
    memory = _memory("latent_slots", total + SLACK, static, device)
    memory[:used] = found
    memory[used:].zero_()
    ones = _memory("latent_last", count, static, device).fill_(1)
    if static is not None:
        ends = _memory("latent_ends", count + 1, static, device).copy_(ends)
    starts = batch.query_start_loc[rows.start : rows.stop + 1]
    return Part(
        slice(first, stop),
        int((host[rows.start + 1 : rows.stop + 1] - host[rows]).max()),
        starts - first if first else starts,
        ends,
        memory[:total],
        ones,
    )


def _memory(name: str, count: int, static: Any | None, device: torch.device) -> torch.Tensor:
    if static is None:
        return torch.empty(count, dtype=torch.int32, device=device)
    fixed: torch.Tensor = static.get(name, (count,), torch.int32)
    return fixed
