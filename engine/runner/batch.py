"""From a StepPlan to the inputs of one step: vectorised host arithmetic, one upload, gathers on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.engine.core.step import StepPlan
from headrace.engine.runner.randomness import uniform
from headrace.engine.runner.rows import Rows
from headrace.engine.runner.staging import StagingRing, packed_size
from headrace.platforms.batch import BatchView
from headrace.platforms.device import DeviceRuntime


@dataclass(slots=True)
class SampleInputs:
    """R requests that sample in this step. Host arrays and, in the order of the plan, their device tensors."""

    index: np.ndarray  # [R] index in the plan
    rows: np.ndarray  # [R]
    positions: np.ndarray  # [R] place in the sequence of the token to be sampled
    greedy: bool  # every one of them
    logit_index: torch.Tensor  # [R] int64: which hidden state
    out_index: torch.Tensor  # [R] int64: where in the flat token pool the sampled token goes
    temperature: torch.Tensor  # [R] float32, as are top_p, min_p, uniform
    top_k: torch.Tensor  # [R] int32
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor


@dataclass(slots=True)
class StepInputs:
    token_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    view: BatchView
    sample: SampleInputs


@dataclass(slots=True)
class StaticInputs:
    """Inputs of fixed address for captured steps; a step of n requests uses the first n."""

    token_ids: torch.Tensor  # [N] int32
    block_tables: list[torch.Tensor]  # a group: [N, max blocks] int32


class BatchBuilder:
    """Owns the packed upload of a step's integers."""

    def __init__(
        self, rows: Rows, block_size: int, runtime: DeviceRuntime, max_tokens: int, max_reqs: int
    ) -> None:
        self._rows = rows
        self._block_size = block_size
        self._groups = len(rows.tables_host)
        counts = [max_tokens] * (2 + self._groups) + [max_reqs + 1] * 10
        self._ring = StagingRing(runtime, packed_size(counts))

    def build(
        self,
        plan: StepPlan,
        pad_to: int = 0,
        static: StaticInputs | None = None,
        pad_tokens: int = 0,
    ) -> StepInputs:
        """`pad_to`: a step is filled up to that many requests with the padding row, one token each. With `pad_tokens`
        the last of them has all that is missing of so many tokens, and counts as a request like any other."""
        rows, size = self._rows, self._block_size
        count, padding = len(plan.rows), max(pad_to - len(plan.rows), 0)
        step_rows = _extend(plan.rows, padding, rows.rows)
        computed = _extend(plan.num_computed, padding, 0)
        new = _extend(plan.num_new, padding, 1)
        if pad_tokens:
            new[-1] = pad_tokens - new[:-1].sum()
        starts = np.zeros(len(step_rows) + 1, np.int64)
        np.cumsum(new, out=starts[1:])
        tokens, total = int(starts[count]), int(starts[-1])
        # a padding row without tokens has a key all the same
        seq_lens = np.maximum(computed + new, 1).astype(np.int32)

        token_rows = np.repeat(step_rows, new)
        positions = np.arange(total) - np.repeat(starts[:-1] - computed, new)
        slots = rows.tables_host[:, token_rows, positions // size].astype(np.int64)
        slots *= size
        slots += positions % size
        slots[:, tokens:] = -1
        query_start_loc = starts.astype(np.int32)
        upload = [
            token_rows * rows.width + positions,
            positions,
            slots,
            step_rows,
            query_start_loc,
            seq_lens,
        ]
        index = np.flatnonzero(plan.sample)
        device = self._ring.upload([*upload, *self._sampling(plan, starts, index)])
        token_index, device_positions, device_slots, device_rows, device_starts, device_lens = (
            device[:6]
        )
        longest = int(seq_lens.max())
        blocks = rows.tables.shape[2] if static else -(-longest // size)
        view = BatchView(
            num_reqs=len(step_rows) if pad_tokens else count,
            num_tokens=total if pad_tokens else tokens,
            num_decode_reqs=plan.num_decode,
            max_query_len=int(new.max()),
            max_seq_len=longest,
            query_start_loc=device_starts,
            seq_lens=device_lens,
            block_tables=self._tables(device_rows, blocks, static),
            slot_mappings=list(device_slots),
            query_start_loc_host=query_start_loc,
            seq_lens_host=seq_lens,
            block_tables_host=[table[step_rows, :blocks] for table in rows.tables_host],
            block_size=size,
        )
        pool = rows.tokens.view(-1)
        if static:
            token_ids = torch.index_select(pool, 0, token_index, out=static.token_ids[:total])
        else:
            token_ids = pool.index_select(0, token_index)
        sampling_rows = plan.rows[index]
        sample = SampleInputs(
            index,
            sampling_rows,
            seq_lens[index],
            not rows.temperature[sampling_rows].any(),
            *device[6:],
        )
        return StepInputs(token_ids, device_positions, view, sample)

    def _sampling(self, plan: StepPlan, starts: np.ndarray, index: np.ndarray) -> list[np.ndarray]:
        """In the order of SampleInputs' tensors."""
        rows = self._rows
        chosen = plan.rows[index].astype(np.int64)
        position = plan.num_computed[index].astype(np.int64) + plan.num_new[index]
        temperature = rows.temperature[chosen]
        draws = uniform(rows.seed[chosen], position) if temperature.any() else temperature
        return [
            starts[index + 1] - 1,
            chosen * rows.width + position,
            temperature,
            rows.top_k[chosen],
            rows.top_p[chosen],
            rows.min_p[chosen],
            draws,
        ]

    def _tables(
        self, device_rows: torch.Tensor, blocks: int, static: StaticInputs | None
    ) -> list[torch.Tensor]:
        tables = self._rows.tables
        if static is None:
            return [table[:, :blocks].index_select(0, device_rows) for table in tables]
        count = len(device_rows)
        return [
            torch.index_select(table, 0, device_rows, out=out[:count])
            for table, out in zip(tables, static.block_tables, strict=True)
        ]


def _extend(values: np.ndarray, padding: int, fill: int) -> np.ndarray:
    """int64 copy with `padding` more entries."""
    out = np.full(len(values) + padding, fill, np.int64)
    out[: len(values)] = values
    return out
