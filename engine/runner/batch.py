"""From a StepPlan to the inputs of one step: vectorised host arithmetic, one upload, gathers on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.engine.core.step import StepPlan
from headrace.engine.runner.randomness import uniform
from headrace.engine.runner.rows import Rows
from headrace.engine.runner.staging import FixedUpload, Shape, StagingRing, packed_size
from headrace.platforms.batch import BatchView
from headrace.platforms.device import DeviceRuntime


@dataclass(slots=True)
class SampleInputs:
    """R requests that sample in this step. Host arrays and, in the order of the plan, their device tensors; those of a
    padded decode are longer."""

    index: np.ndarray  # [R] index in the plan
    rows: np.ndarray  # [R]
    positions: np.ndarray  # [R] place in the sequence of the token to be sampled
    greedy: bool  # every one of them
    logit_index: torch.Tensor | None  # [R] int64: which hidden state; None = the first R
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
    # fills token ids and block tables; the captured step of a decode does so itself
    gather: Callable[[], None] | None = None


@dataclass(slots=True)
class StaticInputs:
    """Inputs of fixed address for captured steps; a step of n requests uses the first n."""

    token_ids: torch.Tensor  # [N] int32
    block_tables: list[torch.Tensor]  # a group: [N, max blocks] int32
    whole: bool = False  # decodes are captured from their gathers to what they sample


class _Decode(NamedTuple):
    """Where a decode of one size has its inputs."""

    upload: FixedUpload
    token_ids: torch.Tensor
    block_tables: list[torch.Tensor]
    slots: list[torch.Tensor]
    options: tuple[torch.Tensor, ...]  # in the order of SampleInputs


class _HostTables(dict[int, np.ndarray]):
    """The host's block tables of a step's rows, taken when they are asked for: most attention asks for none."""

    def __init__(self, *of: Any) -> None:
        self._tables, self._rows, self._blocks = of

    def __missing__(self, group: int) -> Any:
        return self._tables[group][self._rows, : self._blocks]


class BatchBuilder:
    """Owns the packed upload of a step's integers."""

    def __init__(
        self, rows: Rows, block_size: int, runtime: DeviceRuntime, max_tokens: int, max_reqs: int
    ) -> None:
        self._rows = rows
        self._block_size = block_size
        self._groups = len(rows.tables_host)
        counts = [max_tokens] * (2 + self._groups) + [max_reqs + 1] * 10
        # of a decode: changes of block tables besides
        most = [self.changes(max_reqs)] * 2 + [max_reqs + 3] * (10 + self._groups)
        self._ring = StagingRing(runtime, max(packed_size(counts), packed_size(most)))
        self._decodes: dict[int, _Decode] = {}
        self._counting = np.arange(max_reqs + 1, dtype=np.int32)
        self._starts = torch.arange(max_reqs + 1, dtype=torch.int32, device=runtime.device)

    def changes(self, size: int) -> int:
        """Changes of block tables that a decode of `size` requests may enter itself: rarely do all need a block at
        once."""
        return (8 + size // 4) * self._groups

    def build(
        self,
        plan: StepPlan,
        pad_to: int = 0,
        static: StaticInputs | None = None,
        pad_tokens: int = 0,
    ) -> StepInputs:
        """`pad_to`: a step is filled up to that many requests with the padding row, one token each. With `pad_tokens`
        the last of them has all that is missing of so many tokens, and counts as a request like any other."""
        if static and not pad_tokens and plan.num_decode == len(plan.rows):
            return self._decode(plan, pad_to, static)
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
        token_index = token_rows * rows.width + positions
        upload = [token_index, positions, slots, step_rows, query_start_loc, seq_lens]
        index = np.flatnonzero(plan.sample)
        device = self._ring.upload([*upload, *self._sampling(plan, starts, index)])
        at, device_positions, device_slots, device_rows, device_starts, device_lens = device[:6]
        longest = int(seq_lens.max())
        blocks = rows.tables.shape[2] if static else -(-longest // size)
        padded = (len(step_rows), total) if pad_tokens else (count, tokens)
        sizes = (*padded, plan.num_decode, int(new.max()), longest)
        tables = self._tables(device_rows, blocks, static)
        on_device = (device_starts, device_lens, tables, list(device_slots))
        on_host = (query_start_loc, seq_lens, _HostTables(rows.tables_host, step_rows, blocks))
        view = BatchView(*sizes, *on_device, *on_host, size)
        pool = rows.tokens.view(-1)
        if static:
            token_ids = torch.index_select(pool, 0, at, out=static.token_ids[:total])
        else:
            token_ids = pool.index_select(0, at)
        sampling_rows = plan.rows[index]
        greedy = not rows.temperature[sampling_rows].any()
        sample = SampleInputs(index, sampling_rows, seq_lens[index], greedy, *device[6:])
        return StepInputs(token_ids, device_positions, view, sample)

    def _decode(self, plan: StepPlan, size: int, static: StaticInputs) -> StepInputs:
        """As `build`, of one token a request: nothing to count, and views that were made once."""
        rows, block, count = self._rows, self._block_size, len(plan.rows)
        decode = self._decodes.get(size) or self._fixed(size, static)
        turn = self._ring.begin()
        host, device = decode.upload.host[turn], decode.upload.device
        places, entries, index, out_index, positions, chosen, slots, lens, options, draws = host
        slots, options, updates = slots[:, :size], options[:, :size], plan.block_updates
        # more of them were entered by themselves, as are all without a graph of whole steps
        used = len(updates) if static.whole and len(updates) <= len(places) else 0
        if used:
            places[:used], entries[:used] = rows.change(updates)
        # the first block of the row that belongs to nobody
        places[used:], entries[used:] = rows.rows * rows.tables_host.shape[2], 0
        chosen[:count], chosen[count:] = plan.rows, rows.rows
        positions[:count], positions[count:] = plan.num_computed, 0
        np.multiply(chosen, rows.width, out=index)
        np.add(index, positions, out=index)
        np.add(index, 1, out=out_index)
        at, within = np.divmod(positions, block)
        np.multiply(rows.tables_host[:, chosen, at], block, out=slots, dtype=np.int64)
        slots += within
        slots[:, count:] = -1
        np.add(positions, 1, out=lens, casting="unsafe")
        np.take(rows.options, chosen, axis=1, out=options, mode="clip")
        greedy = not options[0, :count].any()
        if not greedy:
            draws[:count] = uniform(rows.seed[plan.rows], lens[:count])
        self._ring.send(decode.upload, turn)
        lengths, end = lens.copy(), size + 1
        tables = _HostTables(rows.tables_host, chosen.copy(), rows.tables.shape[2])
        sizes = (count, count, count, 1, int(lengths.max()))
        on_device = (self._starts[:end], device[7], decode.block_tables, decode.slots)
        view = BatchView(*sizes, *on_device, self._counting[:end], lengths, tables, block)
        sampled = self._counting[:count], plan.rows, lengths[:count], greedy, None
        sample = SampleInputs(*sampled, device[3], *decode.options)

        def gather() -> None:
            if static.whole:
                rows.tables.view(-1).index_copy_(0, device[0], device[1])
            torch.index_select(rows.tokens.view(-1), 0, device[2], out=decode.token_ids)
            for table, out in zip(rows.tables, decode.block_tables, strict=True):
                torch.index_select(table, 0, device[5], out=out)

        if not static.whole:
            gather()
        late = gather if static.whole else None
        return StepInputs(decode.token_ids, device[4], view, sample, late)

    def _fixed(self, size: int, static: StaticInputs) -> _Decode:
        wide = -(-size // 4) * 4  # every row begins at a multiple of 16 bytes, as kernels like it
        changes, many = (self.changes(size),), (size,)
        long = (changes, *[many] * 4, (self._groups, wide))
        shapes: list[Shape] = [(shape, torch.int64) for shape in long]
        shapes[1:1] = [(changes, torch.int32)]
        shapes += [(many, torch.int32), ((4, wide), torch.int32), (many, torch.float32)]
        upload = self._ring.fixed(*shapes)
        *_, slots, _, options, draws = upload.device
        temperature, top_p, min_p = options[:3, :size].view(torch.float32)
        made = self._decodes[size] = _Decode(
            upload,
            static.token_ids[:size],
            [table[:size] for table in static.block_tables],
            list(slots[:, :size]),
            (temperature, options[3, :size], top_p, min_p, draws),
        )
        return made

    def _sampling(self, plan: StepPlan, starts: np.ndarray, index: np.ndarray) -> list[np.ndarray]:
        """In the order of SampleInputs' tensors."""
        rows, chosen = self._rows, plan.rows[index].astype(np.int64)
        position = plan.num_computed[index].astype(np.int64) + plan.num_new[index]
        options = rows.options[:, chosen]
        temperature, top_p, min_p = options[:3].view(np.float32)
        draws = uniform(rows.seed[chosen], position) if temperature.any() else temperature
        where = (starts[index + 1] - 1, chosen * rows.width + position)
        return [*where, temperature, options[3], top_p, min_p, draws]

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
