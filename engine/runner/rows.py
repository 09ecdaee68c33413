"""Permanent rows: what a worker keeps of each running request.

On the device: the token pool and the block tables. On the host: exact mirrors of the block tables and the sampling
state as a struct of arrays, so that a step gathers its inputs by row index and nothing is ever reordered.
Row `rows` (one past the last) belongs to nobody: padding and dummy steps use it with the dummy block 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.step import NewRow, StepPlan
from headrace.engine.runner.staging import Transfers
from headrace.platforms.device import DeviceRuntime


@dataclass(slots=True)
class RowExtras:
    """The rare parts of a row's sampling as arrays, made once. `bias_ids` are sorted and unique."""

    params: SamplingParams
    bias_ids: np.ndarray = field(init=False)  # [N] int64
    bias: np.ndarray = field(init=False)  # [N] float32
    stop_ids: np.ndarray = field(init=False)  # [M] int64

    def __post_init__(self) -> None:
        items = sorted(self.params.logit_bias.items())
        self.bias_ids = np.array([token for token, _ in items], np.int64)
        self.bias = np.array([value for _, value in items], np.float32)
        self.stop_ids = np.unique(np.array(self.params.stop_token_ids, np.int64))


class Rows:
    """State of `rows` requests of at most `max_model_len` tokens each."""

    def __init__(
        self, rows: int, max_model_len: int, runtime: DeviceRuntime, transfers: Transfers
    ) -> None:
        self.rows = rows
        # One more than the context: the token sampled after the last position has a place, though nobody reads it.
        self.width = max_model_len + 1
        self._runtime = runtime
        self._transfers = transfers
        # zeros, not empty: an operating system hands out zero pages lazily, so unused rows cost nothing on a CPU
        self.tokens = torch.zeros((rows + 1, self.width), dtype=torch.int32, device=runtime.device)
        self.prompt_len = np.zeros(rows + 1, np.int32)
        # what the sampling op is told of each row, in one array: one gather takes all
        self.options = np.zeros((4, rows + 1), np.int32)
        self.temperature, self.top_p, self.min_p = self.options[:3].view(np.float32)
        self.top_k = self.options[3]
        self.top_p.fill(1.0)
        self.seed = np.zeros(rows + 1, np.uint64)
        self.min_tokens = np.zeros(rows + 1, np.int32)
        self.logprobs = np.full(rows + 1, -1, np.int32)
        self.prompt_logprobs = np.full(rows + 1, -1, np.int32)
        # repetition, frequency and presence penalty
        self.factors = np.zeros((rows + 1, 3), np.float32)
        # rows whose logits are changed before sampling: penalties, bias, min_tokens; of those, the first two
        self.shaped = np.zeros(rows + 1, np.bool_)
        self.penalised = np.zeros(rows + 1, np.bool_)
        self.biased = np.zeros(rows + 1, np.bool_)
        self.plain = np.ones(rows + 1, np.bool_)  # neither shaped nor with log-probabilities
        self.extras: dict[int, RowExtras] = {}
        self.tables_host = np.zeros((0, rows + 1, 1), np.int32)
        self.tables = torch.zeros((0, rows + 1, 1), dtype=torch.int32, device=runtime.device)

    def bind_tables(self, groups: int, block_size: int) -> None:
        """Size the block tables for the KV plan; all entries are the dummy block."""
        blocks = math.ceil((self.width - 1) / block_size)
        self.tables_host = np.zeros((groups, self.rows + 1, blocks), np.int32)
        self.tables = torch.zeros(
            self.tables_host.shape, dtype=torch.int32, device=self._runtime.device
        )

    def reset(self) -> None:
        """As if no request had ever been here."""
        self.tables_host.fill(0)
        self.tables.zero_()
        self.extras.clear()
        self.shaped.fill(False)
        self.plain.fill(True)
        self.logprobs.fill(-1)
        self.prompt_logprobs.fill(-1)

    def apply(self, plan: StepPlan) -> None:
        """Enter the plan's new rows and block changes. Doing it twice with the same plan changes nothing."""
        for new in plan.new_rows:
            self._enter(new)
        arrays = [np.frombuffer(new.token_ids, np.int32) for new in plan.new_rows]
        updates = plan.block_updates
        if len(updates):
            arrays += self.change(updates)
        if not arrays:
            return
        views = self._transfers.send(*arrays)
        for new, tokens in zip(plan.new_rows, views, strict=False):
            self.tokens[new.row, : len(tokens)].copy_(tokens)
        if len(updates):
            self.tables.view(-1)[views[-2]] = views[-1]

    def change(self, updates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Enter block changes on the host -> places in the flat tables [N] int64 and what is there now [N] int32."""
        _, rows, blocks = self.tables_host.shape
        flat = (updates[:, 0].astype(np.int64) * rows + updates[:, 1]) * blocks + updates[:, 2]
        tables = self.tables_host.reshape(-1)
        tables[flat] = updates[:, 3]
        # Read back: an entry changed twice is written twice with the same, last value, in whatever order.
        return flat, tables[flat]

    def _enter(self, new: NewRow) -> None:
        row, params = new.row, new.sampling
        self.prompt_len[row] = new.prompt_len
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed
        self.min_tokens[row] = params.min_tokens
        self.logprobs[row] = params.logprobs
        self.prompt_logprobs[row] = params.prompt_logprobs
        masks_stops = params.min_tokens > 0 and bool(params.stop_token_ids)
        shaped = params.needs_penalties or bool(params.logit_bias) or masks_stops
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.factors[row] = penalties
        self.penalised[row] = params.needs_penalties
        self.biased[row] = bool(params.logit_bias)
        self.shaped[row] = shaped
        self.plain[row] = not shaped and params.logprobs < 0
        if shaped:
            self.extras[row] = RowExtras(params)
        else:
            self.extras.pop(row, None)
