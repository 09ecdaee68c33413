"""An executor without a model: real block tables, a paged cache of integers, tokens that depend on all of it.

Each layer writes one 64-bit number a token into its cache, for the whole step, and then every token adds up what it
sees through its block table: exactly the order of a real model. A block that is given away too early, shared
wrongly, released inside the window or left unwritten changes the tokens, so comparing them with `expected_tokens`
(the same sums without any cache) tests the scheduler and the KV cache as a whole.

`make_executor` has the signature of the real factory, so that an engine process can be started with it:
`--executor scripted_executor:make_executor`. Its options are read from `config.model.hf_overrides["scripted"]`.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.engine.core.executor import Progress, WorkerFailed, WorkerInfo
from headrace.engine.core.step import (
    StepPlan,
    StepResult,
    TokenLogprobs,
    decode_plan,
    decode_result,
    encode,
)
from headrace.platforms.kv_layout import CANONICAL, KVFormat, KVPlan, KVSpec

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Script(msgspec.Struct, frozen=True):
    """What the executor does. Steps and rows count from 0."""

    vocab: int = 1000
    windows: tuple[int, ...] = (0,)  # one a layer
    step_seconds: float = 0.0
    seconds_per_token: float = 0.0
    load_seconds: float = 0.0
    fail_load: str = ""
    fail_call: str = ""
    fail_steps: tuple[int, ...] = ()  # steps answered with an error
    fail_above: int = 0  # steps of more tokens than this fail with `retry`; 0 = never
    nan_token: int = -1  # a request whose visible tokens include it has logits that are not finite
    die_at_step: int = -1  # the worker is gone from this step on
    end_token: int = -1  # sampled where `end_every` divides the position
    end_every: int = 0
    free_memory: int = 1 << 26
    depth: int = 2
    block_size: int = 16
    graphs: int = 0  # captured one a call
    workers: int = 0  # child processes that must not outlive the engine


def _mix(values: np.ndarray) -> np.ndarray:
    """A permutation of 64-bit numbers."""
    values = (values ^ (values >> np.uint64(31))) * _FACTOR
    return values ^ (values >> np.uint64(29))


def _embed(tokens: np.ndarray, start: int) -> np.ndarray:
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    return _mix(
        np.maximum(tokens, 0).astype(np.uint64) * np.uint64(1 << 32) + positions + np.uint64(1)
    )


def _visible_sums(seen: np.ndarray, first: int, start: int, window: int) -> np.ndarray:
    """Sums over what each position from `start` on sees; `seen` holds positions `first` to the last."""
    total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(seen, dtype=np.uint64)])
    ends = np.arange(start, first + len(seen)) + 1
    begins = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
    return total[ends - first] - total[np.maximum(begins, first) - first]


def _next_token(hidden: int, position: int, script: Script) -> int:
    if script.end_every and position % script.end_every == 0:
        return script.end_token
    token = int(hidden % np.uint64(script.vocab))
    return (token + 1) % script.vocab if token == script.nan_token else token


def expected_tokens(prompt: Sequence[int], count: int, script: Script) -> list[int]:
    """What a request alone on a server without any cache gets, ends ignored."""
    tokens = list(prompt)
    for _ in range(count):
        hidden = _embed(np.array(tokens, np.int64), 0)
        for window in script.windows:
            hidden = _mix(hidden + _visible_sums(hidden, 0, 0, window))
        tokens.append(_next_token(hidden[-1], len(tokens), script))
    return tokens[len(prompt) :]


class ScriptedModel:
    """The worker's state and one step of it; checks that every plan keeps the rules of step.py."""

    def __init__(self, script: Script, plan: KVPlan, rows: int, max_model_len: int) -> None:
        self.script = script
        self.block_size = plan.block_size
        self.group_of = {layer: g for g, group in enumerate(plan.groups) for layer in group.layers}
        rng = np.random.default_rng(0)
        # garbage, not zeros: an entry read without having been written must show
        self.caches = [
            rng.integers(
                1, 1 << 62, plan.groups[self.group_of[layer]].num_blocks * plan.block_size
            ).astype(np.uint64)
            for layer in range(len(script.windows))
        ]
        width = -(-max_model_len // plan.block_size)
        self.tables = np.zeros((len(plan.groups), rows, width), np.int64)
        self.tokens = np.full((rows, max_model_len + 1), -1, np.int64)
        self.params: dict[int, Any] = {}
        self.prompt_len = np.zeros(rows, np.int64)
        self.doubtful: set[int] = (
            set()
        )  # rows whose last sampled token is missing: results are ignored

    def run(self, plan: StepPlan) -> StepResult:
        for new in plan.new_rows:
            tokens = np.frombuffer(new.token_ids, np.int32)
            self.tokens[new.row] = -1
            self.tokens[new.row, : len(tokens)] = tokens
            self.params[new.row] = new.sampling
            self.prompt_len[new.row] = new.prompt_len
            self.doubtful.discard(new.row)
        for group, row, index, block in plan.block_updates.tolist():
            self.tables[group, row, index] = block
        self._check(plan)
        script = self.script
        if plan.step_id in script.fail_steps:
            return self._failure(plan, retry=False)
        if script.fail_above and plan.num_tokens > script.fail_above:
            return self._failure(plan, retry=True)
        batch = list(
            zip(plan.rows.tolist(), plan.num_computed.tolist(), plan.num_new.tolist(), strict=True)
        )
        hidden = [_embed(self.tokens[r, c : c + n], c) for r, c, n in batch]
        for layer, window in enumerate(script.windows):
            for (row, start, count), values in zip(batch, hidden, strict=True):
                self.caches[layer][self._slots(layer, row, start, start + count)] = values
            hidden = [
                _mix(values + self._attend(layer, window, row, start, count))
                for (row, start, count), values in zip(batch, hidden, strict=True)
            ]
        return self._sample(plan, batch, hidden)

    def _failure(self, plan: StepPlan, retry: bool) -> StepResult:
        self.doubtful.update(plan.rows.tolist())
        none = np.full(len(plan.rows), -1, np.int32)
        return StepResult(plan.step_id, none, {}, {}, [], 0.0, "scripted failure", retry)

    def _slots(self, layer: int, row: int, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        blocks = self.tables[self.group_of[layer], row, positions // self.block_size]
        assert (blocks > 0).all(), f"row {row} has no block for a token of [{start}, {end})"
        return blocks * self.block_size + positions % self.block_size

    def _attend(self, layer: int, window: int, row: int, start: int, count: int) -> np.ndarray:
        first = max(0, start - window + 1) if window else 0
        seen = self.caches[layer][self._slots(layer, row, first, start + count)]
        return _visible_sums(seen, first, start, window)

    def _sample(
        self, plan: StepPlan, batch: list[tuple[int, int, int]], hidden: list[np.ndarray]
    ) -> StepResult:
        ids = np.full(len(batch), -1, np.int32)
        result = StepResult(plan.step_id, ids, {}, {}, [], device_ms=0.1)
        for index, ((row, start, count), values) in enumerate(zip(batch, hidden, strict=True)):
            params, end = self.params[row], start + count
            stop = min(end, int(self.prompt_len[row]) - 1)
            if params.prompt_logprobs >= 0 and stop > start:
                result.prompt_logprobs[index] = [
                    self._logprobs(int(self.tokens[row, p + 1]), p + 1) for p in range(start, stop)
                ]
            if not plan.sample[index]:
                continue
            if self.script.nan_token in self.tokens[row, :end]:
                result.nan_rows.append(index)
                self.doubtful.add(row)
                continue
            token = _next_token(values[-1], end, self.script)
            ids[index] = self.tokens[row, end] = token
            if params.logprobs >= 0:
                result.logprobs[index] = self._logprobs(token, end)
        return result

    def _logprobs(self, token: int, position: int) -> TokenLogprobs:
        return TokenLogprobs(token, -1.0 - position, 1, [token], [-1.0 - position])

    def _check(self, plan: StepPlan) -> None:
        rows = plan.rows.tolist()
        assert len(set(rows)) == len(rows) > 0, "a row is twice in a step"
        single = (plan.num_new == 1) & plan.sample
        assert single[: plan.num_decode].all() and not single[plan.num_decode :].any(), "order"
        assert (plan.num_new >= 1).all()
        for row, start, count in zip(rows, plan.num_computed, plan.num_new, strict=True):
            known = (self.tokens[row, start : start + count] >= 0).all()
            assert known or row in self.doubtful, "a token nobody sampled"


class ScriptedExecutor:
    """Executor protocol over a thread; plans and results pass through the wire format."""

    def __init__(self, script: Script, rows: int, max_model_len: int = 1 << 16) -> None:
        self.script = script
        self.depth = script.depth
        self._rows, self._max_model_len = rows, max_model_len
        self._plans: queue.Queue[bytes | None] = queue.Queue()
        self._results: queue.Queue[bytes | Exception] = queue.Queue()
        self._read_fd, self._write_fd = os.pipe()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._model: ScriptedModel | None = None
        self._workers: list[Any] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def start(self, progress: Progress) -> WorkerInfo:
        script = self.script
        progress("open", 0, 1, "scripted device")
        for done in range(10):
            progress("load", done, 10, "scripted weights")
            time.sleep(script.load_seconds / 10)
        if script.fail_load:
            raise WorkerFailed(script.fail_load)
        self._start_workers(script.workers)
        size = script.block_size
        formats = [KVFormat(CANONICAL, multiple_of=size, preferred_block_size=size)]
        return WorkerInfo(
            device="scripted:0",
            dtype="float32",
            weight_bytes=1 << 20,
            kv_specs=[KVSpec(1, 4, 4, "float32", window) for window in script.windows],
            kv_formats=[formats for _ in script.windows],
            free_memory=script.free_memory,
            activation_bytes=1 << 10,
            vocab=script.vocab,
            selection=[{"op": "attention", "implementation": "scripted"}],
        )

    def _start_workers(self, count: int) -> None:
        """Children that end when their standard input does, as real workers do."""
        import subprocess
        import sys

        code = "import sys; sys.stdin.read()"
        for _ in range(count):
            self._workers.append(
                subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
            )

    def init_kv(self, plan: KVPlan, progress: Progress) -> None:
        progress("kv", 0, plan.total_bytes, "")
        self._model = ScriptedModel(self.script, plan, self._rows, self._max_model_len)
        progress("warm-up", 1, 1, "")
        self._thread.start()

    def _work(self) -> None:
        assert self._model is not None
        while (data := self._plans.get()) is not None:
            plan = decode_plan(data)
            time.sleep(self.script.step_seconds + self.script.seconds_per_token * plan.num_tokens)
            answer: bytes | Exception
            if plan.step_id == self.script.die_at_step:
                answer = WorkerFailed("worker 0 ended (scripted)")
            else:
                try:
                    answer = encode(self._model.run(plan))
                except AssertionError as error:
                    answer = WorkerFailed(f"broken plan: {error}")
            self._results.put(answer)
            os.write(self._write_fd, b"x")

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(encode(plan))

    def poll(self, timeout: float) -> StepResult | None:
        try:
            answer = self._results.get(timeout=timeout) if timeout else self._results.get_nowait()
        except queue.Empty:
            return None
        os.read(self._read_fd, 1)
        if isinstance(answer, Exception):
            raise answer
        return decode_result(answer)

    def fileno(self) -> int:
        return self._read_fd

    def lose_worker(self, text: str) -> None:
        """From now on `poll` raises: a worker has died, with or without steps in flight."""
        self._results.put(WorkerFailed(text))
        os.write(self._write_fd, b"x")

    def call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, args))
        if method == self.script.fail_call:
            raise WorkerFailed("scripted failure of a call")
        if method == "capture_graph":
            done = sum(call == (method, ()) for call in self.calls)
            return {"graphs": done, "more": done < self.script.graphs}
        return {"method": method, "args": list(args)}

    def close(self) -> None:
        if self._thread.is_alive():
            self._plans.put(None)
            self._thread.join(timeout=5)
        for worker in self._workers:
            worker.stdin.close()
            worker.wait(timeout=5)


def make_executor(config: Any, files: Any, spec: Any, device: Any) -> ScriptedExecutor:
    """The factory an engine process is started with."""
    script = msgspec.convert(config.model.hf_overrides.get("scripted", {}), Script)
    return ScriptedExecutor(script, config.scheduler.max_num_seqs)
