"""Runner: one step on a device. Plans in, sampled tokens out; no Python loop over tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.step import NewRow, StepPlan, StepResult
from headrace.engine.models.base import Model, StepContext
from headrace.engine.runner.batch import BatchBuilder, SampleInputs, StaticInputs, StepInputs
from headrace.engine.runner.graphs import DECODE, Body, Choose, RunnerLimits, StepGraphs, graph_keys
from headrace.engine.runner.kv import Reserve, allocate_caches
from headrace.engine.runner.memory import estimate_activations
from headrace.engine.runner.rows import Rows
from headrace.engine.runner.sampler import SLICE_ELEMENTS, HostLogprobs, Sampler, SamplingOps, score
from headrace.engine.runner.staging import Transfers
from headrace.platforms.collectives import Collectives
from headrace.platforms.device import DeviceRuntime, Event
from headrace.platforms.graph import GraphKey
from headrace.platforms.kv_layout import KVPlan

_GREEDY = SamplingParams(temperature=0.0)
_FILTERED = SamplingParams(top_p=0.9)

PhaseProgress = Callable[[float, float, str], None]


@dataclass(slots=True)
class PendingStep:
    """A launched step: everything is enqueued, the results are on their way to the host."""

    plan: StepPlan
    index: np.ndarray  # indices in the plan that sample
    ids: torch.Tensor | None  # [R] int32 on the host, and padding; None when nothing is sampled
    logprobs: tuple[np.ndarray, HostLogprobs] | None
    prompt_logprobs: tuple[list[tuple[int, int]], HostLogprobs] | None  # (index, positions)
    done: Event
    started: float
    kept: list[torch.Tensor]  # pinned memory that the step's copies read
    graphs: int  # captured so far

    def ready(self) -> bool:
        return self.done.query()

    def result(self) -> StepResult:
        """Waits for the device."""
        self.done.synchronize()
        token_ids = np.full(len(self.plan.rows), -1, np.int32)
        bad: list[int] = []
        if self.ids is not None:
            token_ids[self.index] = sampled = self.ids.numpy()[: len(self.index)]
            bad = self.index[sampled < 0].tolist()
        logprobs = {}
        if self.logprobs is not None:
            indices, numbers = self.logprobs
            pairs = zip(indices.tolist(), numbers.entries(), strict=True)
            logprobs = {index: entry for index, entry in pairs if index not in bad}
        prompt_logprobs = {}
        if self.prompt_logprobs is not None:
            spans, numbers = self.prompt_logprobs
            entries, start = numbers.entries(), 0
            for index, count in spans:
                prompt_logprobs[index] = entries[start : start + count]
                start += count
        elapsed = 1e3 * (time.perf_counter() - self.started)
        found = (self.plan.step_id, token_ids, logprobs, prompt_logprobs, bad)
        return StepResult(*found, device_ms=elapsed, graphs=self.graphs)


class Runner:
    """Executes StepPlans on one rank.

    `launch` enqueues a step and returns at once on devices with streams: a step may follow before the host has seen
    the tokens of the one before, because they are read from the rows' token pool on the device.
    """

    def __init__(
        self,
        model: Model,
        sampling: SamplingOps,
        runtime: DeviceRuntime,
        collectives: Collectives,
        limits: RunnerLimits,
    ) -> None:
        self.model = model
        self.runtime = runtime
        self.limits = limits
        self._collectives = collectives
        self._stream = runtime.stream()
        self._transfers = Transfers(runtime)
        self.rows = Rows(limits.max_num_seqs, limits.max_model_len, runtime, self._transfers)
        self._sampler = Sampler(self.rows, sampling, self._transfers)
        self._builder: BatchBuilder | None = None
        self._graphs: StepGraphs | None = None

    def init_kv(self, plan: KVPlan, reserve: Reserve | None = None) -> None:
        """Allocate the caches (from the device's allocator unless told otherwise); block tables are reset."""
        self.close()
        caches = allocate_caches(
            plan, self.model.kv_specs, reserve or self.runtime.allocator().reserve
        )
        for key, value in caches:
            # The dummy block is read by padding rows and behind freed blocks of a window, where a weight of zero
            # must meet a number: zero times NaN would spread.
            key[0].zero_()
            value[0].zero_()
        self.model.bind_kv(plan, caches)
        self.rows.bind_tables(len(plan.groups), plan.block_size)
        # Weights, caches and rows were filled on the default stream, which the runner's own does not wait for.
        self.runtime.synchronize()
        most = 2 * self.limits.max_num_seqs  # a padded step is less than twice as large
        tokens = max(self.limits.max_num_batched_tokens, most)
        self._builder = BatchBuilder(self.rows, plan.block_size, self.runtime, tokens, most)

    def drop_kv(self, plan: KVPlan) -> None:
        """Let go of the caches of this plan and of the graphs over them, until `init_kv`."""
        self.close()
        nothing = torch.empty(0)
        self.model.bind_kv(plan, [(nothing, nothing)] * len(self.model.kv_specs))
        self._builder = None

    def launch(self, plan: StepPlan) -> PendingStep:
        """Enter the plan's changes, run the model, sample, start the copies to the host."""
        assert self._builder is not None, "init_kv comes first"
        started = time.perf_counter()
        with torch.inference_mode(), self.runtime.use_stream(self._stream):
            graphs, body, prompt = self._graphs, None, None
            key = graphs.pick(plan) if graphs else None
            if graphs and key:
                whole = graphs.static.whole and key.phase == DECODE
                few = len(plan.block_updates) <= self._builder.changes(key.num_reqs)
                if plan.new_rows or not (whole and few):  # else they are entered with the inputs
                    self.rows.apply(plan)
                inputs = self._padded(plan, key, graphs.static)
                body = graphs.run(key, inputs)
                hidden = body.hidden
            else:
                self.rows.apply(plan)
                inputs = self._builder.build(plan)
                scored = (self.rows.prompt_logprobs[plan.rows] >= 0).any()
                wanted = None if scored else inputs.sample.logit_index
                hidden = self._forward(inputs, wanted)
                if wanted is not None:
                    inputs.sample.logit_index = None  # nothing else was computed
            ids, logprobs = self._sample(hidden, inputs, body)
            if plan.num_decode < len(plan.rows):
                prompt = self._prompt_logprobs(plan, hidden, inputs)
            done = self.runtime.event()
            done.record()
        index = inputs.sample.index
        kept, count = self._transfers.take(), self.captured
        return PendingStep(plan, index, ids, logprobs, prompt, done, started, kept, count)

    def _forward(self, inputs: StepInputs, wanted: torch.Tensor | None) -> torch.Tensor:
        plans = [impl.plan(inputs.view, group) for impl, group in self.model.plan_keys]
        context = StepContext(plans, wanted)
        return self.model.forward(inputs.token_ids, inputs.positions, context)

    def _sample(
        self, hidden: torch.Tensor, inputs: StepInputs, body: Body | None = None
    ) -> tuple[torch.Tensor | None, tuple[np.ndarray, HostLogprobs] | None]:
        sample, count = inputs.sample, len(inputs.sample.index)
        if not count:
            return None, None
        ids, where = None, sample.logit_index
        if body is not None and inputs.gather is not None:  # it has sampled
            raw, ids = body.raw, body.ids
            if self._collectives.rank == 0 and self.rows.plain[sample.rows].all():
                return self._transfers.fetch(ids), None
        else:
            chosen = hidden[:count] if where is None else hidden.index_select(0, where)
            raw = self.model.logits(chosen)
        if ids is None or self.rows.shaped[sample.rows].any():  # once more, from other logits
            ids = self._choose(self._sampler.sample, raw[:count], sample)
        if self._collectives.rank != 0:
            return None, None
        return self._transfers.fetch(ids), self._sampler.logprobs(raw, ids, sample)

    def _choose(self, how: Choose, raw: torch.Tensor, sample: SampleInputs) -> torch.Tensor:
        """Sample, and put what was sampled into the token pool."""
        if self._collectives.rank == 0:
            ids = how(raw, sample)
        else:
            ids = torch.empty(len(raw), dtype=torch.int32, device=raw.device)
        # One rank decides: sums that differ in the last bit between ranks can then never split their sequences.
        ids = self._collectives.broadcast(ids)
        places = sample.out_index[: len(ids)]
        self.rows.tokens.view(-1).index_copy_(0, places, ids.clamp(min=0))
        return ids

    def _prompt_logprobs(
        self, plan: StepPlan, hidden: torch.Tensor, inputs: StepInputs
    ) -> tuple[list[tuple[int, int]], HostLogprobs] | None:
        """Scores of prompt tokens that follow this chunk's positions, where asked: in slices of bounded memory."""
        rows = plan.rows
        known = self.rows.prompt_len[rows] - 1 - plan.num_computed
        counts = np.where(self.rows.prompt_logprobs[rows] >= 0, np.clip(known, 0, plan.num_new), 0)
        asked = np.flatnonzero(counts)
        if not len(asked):
            return None
        counts = counts[asked]
        k = np.repeat(self.rows.prompt_logprobs[rows[asked]], counts)
        starts = inputs.view.query_start_loc_host[asked].astype(np.int64)
        offsets = np.arange(len(k)) - np.repeat(np.cumsum(counts) - counts, counts)
        first = rows[asked].astype(np.int64) * self.rows.width + plan.num_computed[asked]
        where, targets = self._transfers.send(
            np.repeat(starts, counts) + offsets, np.repeat(first + 1, counts) + offsets
        )
        ids = self.rows.tokens.view(-1)[targets]
        most = int(k.max())
        step = max(1, SLICE_ELEMENTS // self.model.spec.vocab)
        parts = []
        for low in range(0, len(k), step):
            raw = self.model.logits(hidden.index_select(0, where[low : low + step]))
            parts.append(score(self._sampler.logprobs_op, raw, ids[low : low + step], most))
        numbers = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        spans = list(zip(asked.tolist(), counts.tolist(), strict=True))
        return spans, self._sampler.to_host(k, numbers)

    def _all_kinds(self) -> None:
        """Steps that launch every kernel which steps may launch: those depend on how many requests there are."""
        most, chunk = self.limits.max_num_seqs, min(self.limits.max_num_batched_tokens, 32)
        decodes = ([1] * min(1 << power, most) for power in range(most.bit_length() + 1))
        mixed = ([1] * count + [chunk] for count in (0, 1, most - 1))
        for at, num_new in enumerate((*decodes, *mixed)):
            self._dummy(num_new, _FILTERED if at % 2 else _GREEDY)
            self.rows.tokens.zero_()  # what was sampled may be no token

    def dummy_plan(self, num_new: Sequence[int], sampling: SamplingParams) -> StepPlan:
        """A plan like any other, but for the row that belongs to nobody and its dummy block."""
        row, count = self.rows.rows, len(num_new)
        decodes = next((at for at, new in enumerate(num_new) if new != 1), count)
        return StepPlan(
            step_id=-1,
            rows=np.full(count, row, np.int32),
            num_computed=np.zeros(count, np.int32),
            num_new=np.asarray(num_new, np.int32),
            sample=np.ones(count, np.bool_),
            num_decode=decodes,
            new_rows=[NewRow(row, "", b"\0\0\0\0", 1, sampling)],
            block_updates=np.zeros((0, 4), np.int32),
        )

    def measure(self, plan: KVPlan) -> int:
        """Bytes that the largest step takes beside weights and caches; only the layout of `plan` matters.

        Measured by running that step, but on a device without streams: that is the host, where the step would take
        seconds and the peak would be the whole process's. An estimate does there, for memory can be overdrawn.
        """
        runtime, limits = self.runtime, self.limits
        count = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        if self._stream is None:
            # what captured steps hold between them: at most twice the largest one's
            graphs = 2 * max((key.num_tokens for key in self.graph_keys()), default=0)
            tokens = limits.max_num_batched_tokens + graphs
            world, spec = self._collectives.world, self.model.spec
            return estimate_activations(spec, tokens, count, world, SLICE_ELEMENTS)

        def reserve(nbytes: int, tag: str) -> torch.Tensor:  # gone when the real caches are bound
            return torch.zeros(nbytes, dtype=torch.uint8, device=runtime.device)

        self.init_kv(plan, reserve)
        runtime.compile_ahead(self._all_kinds)
        self.rows.tokens.zero_()
        runtime.synchronize()
        runtime.reset_peak_memory()
        base = runtime.peak_memory()
        self._largest_step()
        return max(runtime.peak_memory() - base, 0) + self._graph_memory()

    def _largest_step(self) -> None:
        limits = self.limits
        count = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        share, rest = divmod(limits.max_num_batched_tokens, count)
        chunks = [min(share + (i < rest), limits.max_model_len) for i in range(count)]
        self._dummy(chunks, _FILTERED)

    def _graph_memory(self) -> int:
        """Bytes that all graphs may take: each what an eager step of its size takes, and the device's own part. Memory
        that graphs share is not counted on, for small ones are captured first."""
        keys, runtime = self.graph_keys(), self.runtime
        if not keys:
            return 0
        total, graphs = runtime.graphs().traits.graph_bytes * len(keys), self._step_graphs(keys)
        for phase in {key.phase for key in keys}:
            sizes = {key.num_tokens: key for key in keys if key.phase == phase}
            largest = max(sizes)
            with torch.inference_mode(), self.on_stream():
                body = graphs.body(self._dummy_inputs(sizes[largest], graphs.static))
                runtime.synchronize()
                runtime.reset_peak_memory()
                base = runtime.peak_memory()
                body()
                runtime.synchronize()
            total += max(runtime.peak_memory() - base, 0) * sum(sizes) // largest
        return total

    def warm_up(self, progress: PhaseProgress) -> None:
        """Run every kind of step once through the real path. Graphs are captured later, while the server runs."""
        progress(0, 0, "first steps")
        chunk = min(self.limits.max_num_batched_tokens, self.limits.max_model_len, 32)
        self._dummy([chunk], _FILTERED)
        keys = self.graph_keys()
        if keys:
            self._graphs = self._step_graphs(keys)
        self._dummy([1], _GREEDY)

    def _dummy(self, num_new: Sequence[int], sampling: SamplingParams) -> None:
        self.launch(self.dummy_plan(num_new, sampling)).result()

    def graph_keys(self) -> list[GraphKey]:
        traits = self.runtime.graphs().traits
        return graph_keys(self.model, self._collectives, traits, self.limits)

    @property
    def captured(self) -> int:
        return self._graphs.count if self._graphs else 0

    def capture_graph(self) -> bool:
        """Capture one graph beforehand; False when there is none left, or none that is cheaper now than when needed."""
        graphs = self._graphs
        key = graphs.next() if graphs and graphs.warm else None
        if graphs and key:
            with torch.inference_mode(), self.on_stream():
                graphs.capture(key, self._dummy_inputs(key, graphs.static))
        elif graphs and graphs.warm:
            # The first capture gave all memory back that was kept for reuse. To get it again while steps grow takes
            # tens of milliseconds each time, for which the device waits.
            self._largest_step()
        return key is not None

    def _step_graphs(self, keys: list[GraphKey]) -> StepGraphs:
        device, rows = self.runtime.device, max(key.num_reqs for key in keys)
        tokens = max(key.num_tokens for key in keys)
        streams = self._stream is not None  # else a graph holds native calls, and no gathers
        late = (impl.reads_tables for impl in self.model.attention_impls)
        static = StaticInputs(
            torch.zeros(tokens, dtype=torch.int32, device=device),
            [
                torch.zeros((rows, table.shape[1]), dtype=torch.int32, device=device)
                for table in self.rows.tables
            ],
            streams and self._sampler.capturable and not any(late),
        )
        choose = partial(self._choose, self._sampler.unshaped)
        return StepGraphs(self.model, self.runtime, static, keys, streams, choose)

    def _dummy_inputs(self, key: GraphKey, static: StaticInputs) -> StepInputs:
        num_new = [1] * key.num_reqs if key.phase == DECODE else [key.num_tokens]
        plan = self.dummy_plan(num_new, _GREEDY)
        self.rows.apply(plan)
        return self._padded(plan, key, static)

    def _padded(self, plan: StepPlan, key: GraphKey, static: StaticInputs) -> StepInputs:
        assert self._builder is not None, "init_kv comes first"
        fill = 0 if key.phase == DECODE else key.num_tokens
        return self._builder.build(plan, key.num_reqs, static, fill)

    def on_stream(self) -> AbstractContextManager[None]:
        return self.runtime.use_stream(self._stream)

    def reset(self) -> None:
        """Forget every request: rows keep nothing, tables point at the dummy block."""
        with self.runtime.use_stream(self._stream):
            self.rows.reset()

    def close(self) -> None:
        """Drop the graphs: this must happen before the collectives they hold are closed."""
        if self._graphs is not None:
            self._graphs.release()
            self._graphs = None
