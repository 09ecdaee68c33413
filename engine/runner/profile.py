"""Where a step's time goes. A load of its own is put on the runner, some of its steps run as the engine runs them, two
in flight, and then its ops are told apart: by the graph where that can be done (a CPU's tape), else one by one by the
host's clock, and on devices whose kernels torch's profiler records, by that: `ops` says then what each op has to do,
and `trace` holds the kernels of the ops run one by one ("headrace op N") and of the steps ("headrace step N").
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, record_function

from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.step import NewRow, StepPlan
from headrace.engine.models.base import Model, StepContext
from headrace.engine.runner.batch import StepInputs
from headrace.engine.runner.graphs import StaticBuffers
from headrace.engine.runner.watch import (
    MARK,
    Call,
    OpRow,
    Spans,
    on_host,
    stored,
    watched_ops,
    watched_steps,
)
from headrace.platforms.graph import GraphKey
from headrace.platforms.kv_layout import KVPlan
from headrace.platforms.ops import Ops
from headrace.platforms.profiling.costs import attend
from headrace.platforms.profiling.rates import multiply_rate, read_rate

if TYPE_CHECKING:
    from headrace.engine.runner.runner import Runner

REPEATS = 5  # of ops; medians are told
# Steps before the clock starts: so many that sizes are captured by then.
WARM = 6
STEPS, SECONDS = (3, 32), 4.0  # steps that are timed: from, to, and about how long
FILL_SECONDS = 20.0
_KINDS = ("kernel", "gpu_memcpy", "gpu_memset", "user_annotation")
_LAUNCHES = ("_runtime", "_driver")


Entries = tuple[list[NewRow], np.ndarray]  # of a plan: new rows, block updates


class Load:
    """`requests` rows with `context` tokens that are in the cache, but for those that a step reads: one, or `prompt`
    beyond the context; in the latter case `decodes` rows before them read one. Blocks are shared where the cache is
    too small for all.
    """

    def __init__(self, runner: Runner, kv: KVPlan, sizes: tuple[int, int, int, int]) -> None:
        """`sizes`: requests, context, prompt, decodes."""
        requests, context, prompt, decodes = sizes
        limits, tokens = runner.limits, requests * prompt + decodes
        if decodes and not prompt:
            raise ValueError("decodes are beside requests that read a prompt; say prompt, too")
        most = limits.max_num_seqs - decodes
        if not 1 <= requests <= most:
            raise ValueError(f"requests must be from 1 to {most}, not {requests}")
        most = limits.max_model_len - 1 - prompt
        if not (0 if prompt and not decodes else 1) <= context <= most:
            raise ValueError(f"context must be from 1 to {most}, not {context}")
        if tokens > limits.max_num_batched_tokens:
            raise ValueError(
                f"the step has {tokens} tokens, more than {limits.max_num_batched_tokens}; "
                "raise --max-num-batched-tokens"
            )
        self._runner, self._kv, self.requests = runner, kv, requests + decodes
        self.prompt, self._context, self._decodes = prompt, context, decodes
        self.known = context + prompt
        self.cached = self.known - (prompt or 1)
        shape, vocab = (self.requests, self.known), runner.model.spec.vocab
        self._tokens = np.random.default_rng(0).integers(0, vocab, shape, np.int32)

    def fill(self) -> int:
        """Compute the contexts, of as many rows as time allows; the others look at the same blocks. Their number."""
        most, row = self._runner.limits.max_num_batched_tokens, 0
        end = time.perf_counter() + FILL_SECONDS
        while row < self.requests and (row == 0 or time.perf_counter() < end):
            rows = np.arange(row, min(self.requests, row + max(1, most // max(self.cached, 1))))
            new, done = self._entries(rows, self.requests), 0
            while done < self.cached:
                count = min(self.cached - done, most // len(rows))
                self._run(self._plan(rows, done, count, new, False))
                new, done = ([], _NO_BLOCKS), done + count
            row = int(rows[-1]) + 1
        self._run(self.step(0, self._entries(np.arange(self.requests), row)))
        return row

    def step(self, number: int, new: Entries | None = None) -> StepPlan:
        """Step `number` of a decode follows the one before it; of a prompt, all are the same."""
        last = self._runner.limits.max_model_len - 1
        rows = np.arange(self.requests)
        decodes = rows < (self._decodes if self.prompt else self.requests)
        done = np.where(decodes, min(self._context - 1 + number, last), self.cached)
        count = np.where(decodes, 1, self.prompt)
        return self._plan(rows, done, count, new or ([], _NO_BLOCKS), True)

    def _run(self, plan: StepPlan) -> None:
        self._runner.launch(plan).result()

    def _plan(
        self, rows: np.ndarray, done: Any, count: Any, new: Entries, sample: bool
    ) -> StepPlan:
        size, (new_rows, blocks) = len(rows), new
        new_tokens = np.full(size, count, np.int32)
        return StepPlan(
            step_id=-1,
            rows=rows.astype(np.int32),
            num_computed=np.full(size, done, np.int32),
            num_new=new_tokens,
            sample=np.full(size, sample, np.bool_),
            num_decode=int((new_tokens == 1).sum()) if sample else 0,
            new_rows=new_rows,
            block_updates=blocks,
        )

    def _entries(self, rows: np.ndarray, own: int) -> Entries:
        """What enters the rows: tokens, and blocks as row r modulo `own` has them."""
        greedy = SamplingParams(temperature=0.0)
        new = [NewRow(int(r), "", self._tokens[r].tobytes(), self.known, greedy) for r in rows]
        length = min(self.known + WARM + STEPS[1], self._runner.limits.max_model_len)
        index = np.arange(-(-length // self._kv.block_size))
        updates = []
        for group, pool in enumerate(self._kv.groups):
            block = 1 + ((rows % own)[:, None] * len(index) + index) % (pool.num_blocks - 1)
            row = np.broadcast_to(rows[:, None], block.shape)
            places = (np.full(block.shape, group), row, np.broadcast_to(index, block.shape), block)
            updates.append(np.stack(places, axis=-1).reshape(-1, 4))
        return new, np.concatenate(updates).astype(np.int32)


_NO_BLOCKS = np.zeros((0, 4), np.int32)


class _WithHead:
    """A step from token ids to logits, over inputs of fixed address."""

    def __init__(self, model: Model, inputs: StepInputs, device: torch.device) -> None:
        self._model, self._inputs = model, inputs
        plans = [
            impl.plan(inputs.view, group, StaticBuffers(device)) for impl, group in model.plan_keys
        ]
        self._context = StepContext(plans, inputs.sample.logit_index)

    def __call__(self) -> None:
        inputs = self._inputs
        hidden = self._model.forward(inputs.token_ids, inputs.positions, self._context)
        self._model.logits(hidden[: inputs.view.num_reqs])


def profile_step(
    runner: Runner, ops: Ops, kv: KVPlan, sizes: tuple[int, int, int, int]
) -> dict[str, Any]:
    """`sizes`: requests, context, prompt, decodes. A step of `requests` requests, each of `context` tokens, that reads
    the last one of each or `prompt` more; then also the last one of `decodes` others.

    Rows and cache are overwritten: nothing else may be in them. step_s: from one step to the next, two in flight; host:
    processor seconds of this thread in it, by part, and as "wait" the seconds until the device is ready; ops: (op,
    detail, bytes, operations, seconds, 0 where the trace says it) in order; bandwidth: bytes a second that are read,
    multiply: operations a second of a large product, both measured; filled: requests with a context of their own.
    ValueError when it cannot be had.
    """
    load = Load(runner, kv, sizes)
    runtime = runner.runtime
    activity = runtime.profiler_activity()
    try:
        filled = load.fill()
        spans = Spans()
        numbers = _steps(runner, load, spans)
        rows: list[OpRow] = []
        trace: list[dict[str, Any]] = []
        if activity is not None:
            rows, trace = _traced(runner, ops, (load, numbers, spans), activity)
        elif not load.prompt:
            rows = _taped(runner, load, spans)
        if not any(
            event["cat"] == "kernel" for event in trace
        ):  # a profiler may be missing its library
            trace = []
            rows = rows if activity is None and rows else _clocked(runner, ops, spans)
        return {
            **dict(zip(("requests", "context", "prompt", "decodes"), sizes, strict=True)),
            "filled": filled,
            "steps": len(numbers),
            "max_model_len": runner.limits.max_model_len,
            "step_s": spans.step(),
            "host": spans.parts(),
            "on_host": on_host(runner),
            "spans": spans.rows,
            "bandwidth": runtime.read_bandwidth() or read_rate(runtime),
            "multiply": multiply_rate(runtime, runner.model.attention_impls[0].query.dtype),
            "ops": rows,
            "trace": trace,
        }
    finally:
        runner.reset()


def _steps(runner: Runner, load: Load, spans: Spans) -> range:
    """Run steps as the engine does, two in flight; the numbers of those that were timed."""
    for number in range(WARM):
        runner.launch(load.step(number)).result()
    began = time.perf_counter()
    runner.launch(load.step(WARM)).result()
    took = time.perf_counter() - began
    numbers = range(WARM, WARM + max(STEPS[0], min(STEPS[1], int(SECONDS / took))))
    with watched_steps(runner, spans):
        in_flight(runner, load, numbers, spans)
    return numbers


def in_flight(runner: Runner, load: Load, numbers: range, spans: Spans) -> None:
    pending = None
    for number in numbers:
        plan = load.step(number)
        with spans.span("step"), record_function(f"{MARK}step {number}"):
            following = runner.launch(plan)
        if pending is not None:
            spans.result(pending)
        pending = following
    if pending is not None:
        spans.result(pending)


def _inputs(runner: Runner, spans: Spans) -> StepInputs:
    """Of the step that was last, built once more: its tokens and blocks are in place."""
    assert runner._builder is not None, "init_kv comes first"
    inputs = runner._builder.build(*spans.built)
    if inputs.gather is not None:
        inputs.gather()
    return inputs


def _taped(runner: Runner, load: Load, spans: Spans) -> list[OpRow]:
    """By a graph whose ops can be replayed one by one; none where it cannot."""
    device, backend = runner.runtime.device, runner.runtime.graphs()
    with torch.inference_mode(), runner.on_stream():
        inputs = _inputs(runner, spans)
        with backend.session():
            body = _WithHead(runner.model, inputs, device)
            key = GraphKey("profile", load.requests, load.requests)
            graph = backend.capture(key, body, inputs.view.host_args())
        runs = [graph.profile() for _ in range(REPEATS)]
        graph.release()
    impls, rows = iter(runner.model.attention_impls), []
    for row in zip(*runs, strict=True):
        first, seconds = row[0], median(one.seconds for one in row)
        nbytes = first.weight_bytes
        if first.op == "attention" and (impl := next(impls, None)):  # once a layer, in order
            nbytes = attend(impl.query, inputs.view, load.requests, stored).nbytes
        rows.append((first.op, first.detail, nbytes, 0, seconds))
    return rows


def _one_by_one(
    runner: Runner, ops: Ops, spans: Spans, activity: ProfilerActivity | None
) -> list[Call]:
    """Every op of a step by itself, and how long the host took for it: the device too, where no profiler sees it."""
    with torch.inference_mode(), runner.on_stream():
        inputs = _inputs(runner, spans)
        body = _WithHead(runner.model, inputs, runner.runtime.device)
        body()
        runner.runtime.synchronize()
        settle = runner.runtime.synchronize if activity is None else None
        with watched_ops(runner.model, ops, inputs.view, settle) as calls:
            body()
        runner.runtime.synchronize()
    return calls


def _clocked(runner: Runner, ops: Ops, spans: Spans) -> list[OpRow]:
    runs = [_one_by_one(runner, ops, spans, None) for _ in range(REPEATS)]
    return [row[0].plain(median(call.seconds for call in row)) for row in zip(*runs, strict=True)]


def _traced(
    runner: Runner, ops: Ops, taken: tuple[Load, range, Spans], activity: ProfilerActivity
) -> tuple[list[OpRow], list[dict[str, Any]]]:
    """The ops, and the profiler's events of them and of the steps, which are taken once more."""
    load, numbers, spans = taken
    with torch.profiler.profile(activities=list({ProfilerActivity.CPU, activity})) as profiler:
        calls = _one_by_one(runner, ops, spans, activity)
        with watched_steps(runner, Spans()):
            in_flight(runner, load, numbers, Spans())
        runner.runtime.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    kept = [_short(event) for event in events if _matters(event)]
    return [call.plain(0.0) for call in calls], kept


def _matters(event: dict[str, Any]) -> bool:
    kind = event.get("cat", "")
    if event.get("ph") != "X" or (kind == _KINDS[-1] and not event["name"].startswith(MARK)):
        return False
    return kind in _KINDS or (kind.endswith(_LAUNCHES) and "correlation" in event.get("args", {}))


def _short(event: dict[str, Any]) -> dict[str, Any]:
    kept = {name: event[name] for name in ("ph", "cat", "ts", "dur", "pid", "tid")}
    args = event.get("args", {})
    kept["args"] = {name: args[name] for name in ("correlation", "stream") if name in args}
    return {**kept, "name": event["name"][:200]}
