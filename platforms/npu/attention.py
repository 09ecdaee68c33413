"""Paged attention by npu_fused_infer_attention_score. Contract: headrace.platforms.attention.

One call serves prompts, chunks, decodes and mixtures: queries lie one after the other ("TND"), keys and values in
blocks that a table names. Lengths are host integers: those of the queries added up, those of the keys one by one.

Sources: torch_npu's documentation of npu_fused_infer_attention_score and npu_scatter_pa_kv_cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from headrace.platforms.attention import PagedAttention
from headrace.platforms.batch import BatchView, HostArgs
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.graph import GraphSupport
from headrace.platforms.kv_layout import KVFormat, Layout
from headrace.platforms.npu.recorder import Recorder, borrowed
from headrace.platforms.npu.runtime import NpuRuntime
from headrace.platforms.queries import AttentionQuery

# Keys and values apart, each [block, token, head, size]: what the scatter writes; the attention reads it flat.
LAYOUT: Layout = ("K", "P", "S", "H", "D")
BLOCK_SIZES = (128, 256, 384, 512)

MASK = 2048  # the compressed causal mask that modes 3 and 4 are given, whatever the lengths
RIGHT_DOWN_CAUSAL, BAND = 3, 4  # sparse_mode: causal to the bottom right; the same within a window
UNLIMITED = 2**31 - 1
MOST_NUMBERS = 2**31 - 1  # of one cache: the op counts its elements in 32 bits


@dataclass(slots=True)
class Plan:
    slots: torch.Tensor  # [T] int64, none to be skipped
    table: torch.Tensor  # [B, P] int32
    query_ends: list[int]  # [B] tokens up to the end of each request's queries; the last is T
    seq_lens: list[int]  # [B]
    block_size: int


class FusedInferAttention(PagedAttention):
    graph = GraphSupport.DECODE_ONE

    def __init__(self, query: AttentionQuery, runtime: DeviceRuntime) -> None:
        super().__init__(query, runtime)
        ones = torch.ones(MASK, MASK, dtype=torch.int8, device=runtime.device)
        self._mask = ones.triu_(1)
        self._spare = torch.empty(0, dtype=torch.int64, device=runtime.device)
        self._rules: dict[str, Any] = {
            "num_heads": query.q_heads,
            "num_key_value_heads": query.kv_heads,
            "scale": query.scale,
            "input_layout": "TND",
            "sparse_mode": BAND if query.window else RIGHT_DOWN_CAUSAL,
            # keys before the query's own
            "pre_tokens": query.window - 1 if query.window else UNLIMITED,
            "next_tokens": 0,
            "atten_mask": self._mask,
        }

    @classmethod
    def kv_formats(cls, query: AttentionQuery) -> Sequence[KVFormat]:
        return (KVFormat(LAYOUT, BLOCK_SIZES, preference=10, preferred_block_size=BLOCK_SIZES[0]),)

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> Plan:
        return Plan(
            self._slots(batch, group, static),
            batch.block_tables[group],
            batch.query_start_loc_host[1:].tolist(),
            batch.seq_lens_host.tolist(),
            batch.block_size,
        )

    def _slots(self, batch: BatchView, group: int, static: Any | None) -> torch.Tensor:
        """The batch's slots, where tokens to be skipped go into the dummy block: the scatter knows no slot to skip, and
        wants slots that differ."""
        slots = batch.slot_mappings[group]
        if len(self._spare) < len(slots):
            spare = torch.arange(len(slots), device=slots.device)
            self._spare = spare.remainder_(BLOCK_SIZES[0])
        filled = torch.where(slots < 0, self._spare[: len(slots)], slots)
        if static is None:
            return filled
        fixed: torch.Tensor = static.get("slots", (len(slots),), torch.int64).copy_(filled)
        return fixed

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Plan,
    ) -> None:
        if not len(k):
            return
        torch.ops.npu.npu_scatter_pa_kv_cache(
            k.contiguous(),
            v.contiguous(),
            k_cache.transpose(1, 2),
            v_cache.transpose(1, 2),
            plan.slots,
            cache_mode="Norm",
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
        tensors = q.contiguous(), flat(k_cache), flat(v_cache)
        rules = {**self._rules, "block_table": plan.table, "block_size": plan.block_size}
        recorder = cast(NpuRuntime, self.runtime).captures.recorder
        if recorder is not None:
            result = captured(recorder, tensors, rules, plan)
        else:
            result, _ = torch.ops.npu.npu_fused_infer_attention_score(
                *tensors,
                actual_seq_lengths=plan.query_ends,
                actual_seq_lengths_kv=plan.seq_lens,
                **rules,
            )
        return result if out is None else out.copy_(result)


def captured(
    recorder: Recorder, tensors: tuple[torch.Tensor, ...], rules: dict[str, Any], plan: Plan
) -> torch.Tensor:
    """The op as a task whose lengths a replay updates: its results and its workspace are then given, not made."""
    q = tensors[0]
    workspace = torch.ops.npu._npu_fused_infer_attention_score_get_max_workspace(
        *tensors,
        actual_seq_lengths=plan.query_ends,
        actual_seq_lengths_kv=plan.seq_lens,
        **rules,
    )
    result, lse = torch.empty_like(q), torch.empty(1, dtype=torch.float32, device=q.device)
    held = [borrowed(tensor) for tensor in (*tensors, workspace, result, lse)]

    def launch(host: HostArgs) -> None:
        torch.ops.npu.npu_fused_infer_attention_score.out(
            *held[:3],
            actual_seq_lengths=host.query_start_loc[1:].tolist(),
            actual_seq_lengths_kv=host.seq_lens.tolist(),
            **rules,
            workspace=held[3],
            out=held[4:],
        )

    recorder.launch(launch)
    return result


def flat(cache: torch.Tensor) -> torch.Tensor:
    """[P, H, S, D] as [P, S, H * D], which is how it lies in memory. ValueError when the op cannot count it."""
    if cache.numel() > MOST_NUMBERS:
        raise ValueError(
            f"a layer's keys are {cache.numel()} numbers and npu_fused_infer_attention_score counts up to "
            f"{MOST_NUMBERS}; lower --kv-cache-memory-bytes"
        )
    blocks, heads, size, width = cache.shape
    return cache.transpose(1, 2).view(blocks, size, heads * width)
