"""Ops that carry two numbers through a real model: feature 0 is the token, feature 1 the state of the sequence.

embedding sets the token; attention reads the state of the position before from the cache, extends it and adds the
difference to the residual stream; everything else passes the two numbers on or adds nothing; the head turns them into
logits. Under tensor parallelism only rank 0's attention adds, since the sums of all ranks are taken behind it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.platforms.attention import PagedAttention
from headrace.platforms.batch import BatchView
from headrace.platforms.graph import GraphSupport
from headrace.platforms.kv_layout import CANONICAL, KVFormat
from headrace.platforms.linear import EmbeddingImpl, LinearImpl
from headrace.platforms.queries import AttentionQuery
from headrace_fake.answers import EXIT, NAN, RAISE, SLEEP, choose, extend


class FakeEmbedding(EmbeddingImpl):
    def __init__(self, query: Any, runtime: Any) -> None:
        super().__init__(query, runtime)
        runtime.vocab_rows = query.vocab

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def __call__(self, ids: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        x = torch.zeros(ids.shape[0], self.query.hidden)
        x[:, 0] = ids + self.runtime.rank * self.query.vocab  # ids count from this rank's first row
        if self.runtime.info.arch == "faulty":
            self._harm(x[:, 0].long().tolist())
        return x

    def _harm(self, tokens: list[int]) -> None:
        if RAISE in tokens:
            raise RuntimeError("the fake device fell over")
        if EXIT in tokens:
            os._exit(3)
        if SLEEP in tokens:
            time.sleep(0.2)


class FakeLinear(LinearImpl):
    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return weight

    def __call__(
        self, x: torch.Tensor, packed: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = torch.zeros(x.shape[0], self.query.out_features) if out is None else out.zero_()
        if self.query.out_features == self.runtime.vocab_rows:
            self._logits(x, y)
        else:
            y[:, :2] = x[:, :2]
        return y

    def _logits(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Fill this rank's part of the vocabulary."""
        rows = self.query.out_features
        start = self.runtime.rank * rows
        vocab = rows * self.runtime.world
        arch = self.runtime.info.arch
        for row, (token, state) in enumerate(x[:, :2].long().tolist()):
            answer = choose(state, token, vocab, arch)
            for score, offset in ((8.0, 2), (9.0, 1), (10.0, 0)):
                local = (answer + offset) % vocab - start
                if 0 <= local < rows:
                    y[row, local] = score
            if arch == "faulty" and token == NAN:
                y[row] = torch.nan


@dataclass(slots=True)
class Plan:
    starts: list[int]
    before: list[int]  # slot of the position before a request's first new token; -1 = none
    slots: torch.Tensor
    size: int


class FakeAttention(PagedAttention):
    @classmethod
    def kv_formats(cls, query: AttentionQuery) -> Sequence[KVFormat]:
        return (KVFormat(CANONICAL, preferred_block_size=16),)

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> Plan:
        starts = batch.query_start_loc_host[: batch.num_reqs + 1]
        first = batch.seq_lens_host[: batch.num_reqs] - np.diff(starts)
        table, size = batch.block_tables_host[group], batch.block_size
        before = [
            int(table[i, (at - 1) // size]) * size + (at - 1) % size if at else -1
            for i, at in enumerate(first.tolist())
        ]
        return Plan(starts.tolist(), before, batch.slot_mappings[group], size)

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Plan,
    ) -> None:
        """What is stored is only known once the sequence has been walked: `attend` writes."""

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
            out = torch.empty(q.shape[0], self.query.q_heads, self.query.v_head_dim)
        out.zero_()
        tokens = q[:, 0, 0].long().tolist()
        carried = q[:, 0, 1].long().tolist()
        slots = plan.slots.tolist()
        for i, before in enumerate(plan.before):
            state = 0
            if before >= 0:
                state = int(k_cache[before // plan.size, 0, before % plan.size, 0])
            for t in range(plan.starts[i], plan.starts[i + 1]):
                state = extend(state, tokens[t])
                if slots[t] >= 0:
                    k_cache[slots[t] // plan.size, 0, slots[t] % plan.size, 0] = state
                if self.runtime.rank == 0:
                    out[t, 0, 1] = state - carried[t]
        return out


class FakeGraphAttention(FakeAttention):
    graph = GraphSupport.DECODE_ONE


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.clone()


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return total.clone(), total


def rotary_embedding(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool,
) -> None:
    """Positions come from the plan."""


def gated(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape[0], x.shape[1] // 2)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    from headrace.platforms.reference.sampling import sample as reference

    return reference(logits, temperature, top_k, top_p, min_p, uniform)


def wrong_sample(logits: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return torch.zeros(logits.shape[0], dtype=torch.int64)
