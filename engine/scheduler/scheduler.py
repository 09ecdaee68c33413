"""Scheduler: which tokens of which requests the next step computes, and what a step's result means for them.

A step takes first one token of every decoding request, then chunks of prompts until `max_num_batched_tokens` are
used. Step n+1 may be scheduled while step n runs: every request that sampled in step n is taken to go on. One that
turns out to have ended had a token too many computed, which is dropped when its result comes.

Rows and blocks are freed at once, even with steps in flight that use them: workers run steps in order, and a row or
a block is only touched by its next owner in a later step (see KVCache). What must not be mixed up are results, so a
step in flight remembers its requests, not their rows; and a preempted request starts again only when all its results
are here, because only then are all its tokens known.

Nobody waits for ever: the request with the best rank is never preempted for another one and every accepted request
fits the cache alone, so it finishes; then the next one has the best rank.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from headrace.engine.config.settings import SchedulerSettings
from headrace.engine.core.request import NO_ROW, Request
from headrace.engine.core.step import NewRow, StepPlan, StepResult, TokenLogprobs
from headrace.engine.ipc.messages import RequestOutput, Stats, Submit
from headrace.engine.kv_cache.cache import KVCache
from headrace.engine.scheduler.policy import WaitingQueue, make_policy

# Good steps after which a token budget that was cut because a step failed is doubled again.
_STEPS_TO_RECOVER = 200

NOT_FINITE = (
    "the model's output for this request was not a finite number; "
    "another dtype (--dtype float32) may avoid it"
)


@dataclass(slots=True, eq=False)
class _Step:
    """A submitted step. `void`: an earlier step failed, so its result means nothing."""

    step_id: int
    requests: list[Request]
    sample: list[bool]
    num_computed: np.ndarray
    tokens: int
    void: bool = False


class Scheduler:
    """All state of all requests. Single-threaded, torch-free; the engine loop is its only caller.

    `settings.max_num_batched_tokens` must be set. `vocab` is the number of token ids the model knows.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        kv: KVCache,
        max_model_len: int,
        vocab: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if settings.max_num_seqs < 1 or settings.max_num_batched_tokens < 1:
            raise ValueError("max_num_seqs and max_num_batched_tokens must be at least 1")
        self.kv = kv
        self.max_model_len = max_model_len
        self.vocab = vocab
        self._settings = settings
        self._clock = clock
        self._policy = make_policy(settings.policy)
        self._budget = settings.max_num_batched_tokens
        self._good_steps = 0
        self._room = min(max_model_len, kv.room(self._budget))
        rows = settings.max_num_seqs
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue(self._policy)
        self._running: list[Request | None] = [None] * rows
        self._free_rows = list(range(rows - 1, -1, -1))
        # By row; all zero in a free row. `known` counts sampled tokens whose values are still in flight.
        self._computed = np.zeros(rows, np.int32)
        self._known = np.zeros(rows, np.int32)
        self._limit = np.zeros(rows, np.int32)
        self._capacity = np.zeros(rows, np.int32)  # tokens the row's blocks have room for
        self._in_flight: deque[_Step] = deque()
        self._new_rows: list[NewRow] = []
        self._chunks: list[tuple[int, int]] = []  # (row, tokens) of the step being made
        self._next_step = 0
        self._next_number = 0
        self._stats = Stats(kv_total_blocks=kv.total_blocks)

    # ---- what the engine asks

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running) - len(self._free_rows)

    def stats(self) -> Stats:
        return msgspec.structs.replace(
            self._stats,
            running=self.num_running,
            waiting=len(self._waiting),
            kv_used_blocks=self.kv.used_blocks,
        )

    @property
    def holds_nothing(self) -> bool:
        """No request, row or block is in use; from counts alone."""
        rows = len(self._free_rows) == len(self._running)
        return rows and not self._requests and not self._waiting and not self.kv.used_blocks

    def problems(self) -> list[str]:
        """Broken invariants: leaked rows or blocks, lost requests. Empty when all is well; for checks and tests."""
        running = [request for request in self._running if request is not None]
        found = self.kv.problems([request.blocks for request in running])
        if len(self._requests) != len(running) + len(self._waiting):
            found.append(
                f"{len(self._requests)} requests, {len(running)} run, {len(self._waiting)} wait"
            )
        free = [row for row, request in enumerate(self._running) if request is None]
        if sorted(self._free_rows) != free:
            found.append(f"free rows are {free}, listed are {sorted(self._free_rows)}")
        if any(
            request.finished or self._running[request.row] is not request for request in running
        ):
            found.append("a row belongs to a finished or another request")
        if self._known[free].any() or self._computed[free].any() or self._limit[free].any():
            found.append("a free row has tokens")
        return found

    # ---- requests come and go

    def add(self, submit: Submit) -> RequestOutput | None:
        """Put a request into the queue; an output when it is refused or has nothing to do.

        ValueError when a request of the same id is unfinished: an answer would end that one.
        """
        if submit.request_id in self._requests:
            raise ValueError(f"request id {submit.request_id!r} is in use")
        problem = self._refusal(submit)
        if problem:
            return RequestOutput(submit.request_id, finish_reason="error", error=problem)
        sampling = submit.sampling
        tokens: array[int] = array("i", submit.token_ids)
        needs_prompt = sampling.prompt_logprobs >= 0 and len(tokens) > 1
        if sampling.max_tokens < 1 and not needs_prompt:
            return RequestOutput(submit.request_id, finish_reason="length")
        request = Request(
            request_id=submit.request_id,
            sampling=sampling,
            tokens=tokens,
            prompt_len=len(tokens),
            limit=min(len(tokens) + max(0, sampling.max_tokens), self._room),
            blocks=self.kv.sequence(submit.cache_salt, submit.adapter_id),
            number=self._next_number,
            priority=submit.priority,
            adapter_id=submit.adapter_id,
            arrival=submit.arrival,
        )
        self._next_number += 1
        self._requests[request.request_id] = request
        self._waiting.push(request)
        return None

    def _refusal(self, submit: Submit) -> str:
        if not submit.token_ids or len(submit.token_ids) % 4:
            return "the prompt has no tokens"
        tokens = np.frombuffer(submit.token_ids, np.int32)
        if len(tokens) >= self.max_model_len:
            return (
                f"the prompt has {len(tokens)} tokens; the context is {self.max_model_len} tokens "
                "and one must be left for the answer"
            )
        if len(tokens) >= self._room:
            return (
                f"the prompt has {len(tokens)} tokens; the KV cache holds {self._room} tokens of one "
                "request (--kv-cache-memory enlarges it)"
            )
        outside = (tokens < 0) | (tokens >= self.vocab)
        if outside.any():
            index = int(outside.argmax())
            return (
                f"token {index} of the prompt is {tokens[index]}; ids go from 0 to {self.vocab - 1}"
            )
        return ""

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests at once; their rows and blocks are free when this returns. Unknown ids are ignored."""
        outputs = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                outputs.append(self._end(request, "abort"))
        return outputs

    def abort_all(self) -> list[RequestOutput]:
        return self.abort(list(self._requests))

    def fail_stalled(self) -> list[RequestOutput]:
        """End the request that is first in the queue although nothing runs; the engine's last resort."""
        head = self._waiting.head()
        if head is None:
            return []
        return [self._end(head, "error", "the server could not find room for this request")]

    def _end(self, request: Request, reason: str, error: str = "") -> RequestOutput:
        output = RequestOutput(request.request_id, finish_reason=reason, error=error)
        if not request.answered:
            self._fill_first(request, output)
        self._retire(request)
        return output

    def _retire(self, request: Request) -> None:
        if request.row == NO_ROW:
            self._waiting.discard(request)
        else:
            self._vacate(request)
            request.finished = True
        del self._requests[request.request_id]

    def _vacate(self, request: Request) -> None:
        """Free the row and the blocks, which stay findable in the prefix cache."""
        row = request.row
        done = min(int(self._computed[row]), len(request.tokens))
        self.kv.register(request.blocks, request.tokens, done)
        self.kv.free(request.blocks)
        for by_row in (self._computed, self._known, self._limit, self._capacity):
            by_row[row] = 0
        self._running[row] = None
        self._free_rows.append(row)
        request.row = NO_ROW

    def _preempt(self, request: Request) -> None:
        """Back to the queue. What it computed may be found in the prefix cache when it starts again."""
        self._vacate(request)
        self._waiting.push(request)
        self._stats.preemptions += 1

    # ---- making a step

    def schedule(self) -> StepPlan | None:
        """The next step, or None when no request can use one now (all wait for results, or there are none)."""
        if not self._requests:
            return None
        if len(self._waiting):
            self._displace()
        rows = self._grow_decodes()
        decodes = len(rows)
        if len(self._waiting) or decodes < self.num_running:  # else all that run decode
            budget = self._budget - decodes
            if decodes and (mixed := self._settings.max_num_mixed_tokens):
                # many decodes leave prompts their share all the same
                budget = min(budget, max(mixed - decodes, mixed // 4, 1))
            budget = self._continue_prefills(budget)
            if len(self._waiting):
                self._admit(budget)
            rows = self._decode_rows()  # some may have come or gone
        return self._build(rows)

    def _decode_rows(self) -> np.ndarray:
        """Rows whose only uncomputed token is the last one and that may sample another."""
        ready = (self._known - self._computed == 1) & (self._known < self._limit)
        return np.flatnonzero(ready).astype(np.int32)

    def _grow_decodes(self) -> np.ndarray:
        """Blocks for every decoding row; returns the rows that decode."""
        rows = self._decode_rows()
        short = rows[self._computed[rows] >= self._capacity[rows]]
        if len(short):
            for request in self._by_rank(short):
                if request.row != NO_ROW:  # not preempted for one before it
                    done = min(int(self._computed[request.row]), len(request.tokens))
                    self.kv.register(request.blocks, request.tokens, done)
                    self._make_room(request, 1)
            rows = self._decode_rows()
        return rows

    def _by_rank(self, rows: np.ndarray) -> list[Request]:
        requests = [self._running[row] for row in rows.tolist()]
        return sorted((r for r in requests if r is not None), key=self._policy.rank)

    def _make_room(self, request: Request, count: int) -> bool:
        """Blocks for the next `count` tokens, taken from the worst-ranked if need be; False: it was the worst."""
        row = request.row
        start = int(self._computed[row])
        while not self.kv.extend(request.blocks, row, start, start + count):
            victim = max((r for r in self._running if r is not None), key=self._policy.rank)
            self._preempt(victim)
            if victim is request:
                return False
        self._capacity[row] = self.kv.capacity(request.blocks)
        return True

    def _continue_prefills(self, budget: int) -> int:
        """Next chunks of started prompts, best rank first; returns what is left of the budget."""
        todo = np.minimum(self._known, self._limit - 1) - self._computed
        decodes = (self._known - self._computed == 1) & (self._known < self._limit)
        rows = np.flatnonzero((todo > 0) & ~decodes)
        if not len(rows):
            return budget
        for request in self._by_rank(rows):
            row = request.row
            if row == NO_ROW:
                continue
            count = min(int(todo[row]), budget)
            if count < 1:
                break
            if self._make_room(request, count):
                self._take_chunk(request, count)
                budget -= count
        return budget

    def _take_chunk(self, request: Request, count: int) -> None:
        row = request.row
        end = int(self._computed[row]) + count
        self.kv.register(request.blocks, request.tokens, end)
        if count > 1 or end < self._known[row] or self._known[row] >= self._limit[row]:
            self._chunks.append((row, count))
        # else a single token that samples: `_build` finds it among the decodes

    def _start_point(self, request: Request, budget: int) -> tuple[int, int, int]:
        """(cached blocks, tokens to compute in all, tokens of the first chunk) if the request started now."""
        end = min(len(request.tokens), request.limit - 1)
        hit = 0
        if not request.wants_prompt_logprobs:  # those need every position computed
            hit = self.kv.match(request.blocks, request.tokens, end - 1)
        return hit, end, min(end - hit * self.kv.block_size, budget)

    def _admit(self, budget: int) -> None:
        """Start waiting requests while tokens, rows and blocks last. Never past the head: big requests do not starve.

        Beyond what a request needs, a block for each running one stays free, or the next steps would preempt.
        The number of running requests stays within the budget, so every one of them advances in every step.
        """
        limit = min(len(self._running), self._budget)
        while budget > 0 and self.num_running < limit:
            request = self._waiting.head()
            if request is None or request.in_flight:
                return
            hit, end, count = self._start_point(request, budget)
            row = self._free_rows[-1]
            start = hit * self.kv.block_size
            ends = (end, start + count)
            if not self.kv.admit(request.blocks, row, hit, ends, self.num_running):
                return
            self._waiting.pop()
            self._free_rows.pop()
            self._start(request, row, start)
            self._take_chunk(request, count)
            budget -= count

    def _start(self, request: Request, row: int, start: int) -> None:
        request.row = row
        self._running[row] = request
        self._computed[row] = start
        self._known[row] = len(request.tokens)
        self._limit[row] = request.limit
        self._capacity[row] = self.kv.capacity(request.blocks)
        sampling = request.sampling
        if sampling.prompt_logprobs >= 0 and request.answered:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
        self._new_rows.append(
            NewRow(
                row=row,
                request_id=request.request_id,
                token_ids=request.tokens.tobytes(),
                prompt_len=request.prompt_len,
                sampling=sampling,
                adapter_id=request.adapter_id,
            )
        )
        if not request.scheduled:
            request.scheduled = True
            if request.arrival:
                request.queued_s = max(0.0, self._clock() - request.arrival)
            request.cached_tokens = start
            if self.kv.caching:
                self._stats.prefix_queries += request.prompt_len
                self._stats.prefix_hits += start
            self._stats.prompt_tokens += request.prompt_len - start

    def _displace(self) -> None:
        """Preempt running requests that the policy ranks so far below the head of the queue that it takes their
        place, if that is enough for the head to start."""
        head = self._waiting.head()
        if head is None or head.in_flight:
            return
        below = [r for r in self._running if r is not None and self._policy.displaces(head, r)]
        if not below or self._starts(head, self.num_running):
            return
        gain = np.sum([self.kv.gain(request.blocks) for request in below], axis=0)
        if not self._starts(head, self.num_running - len(below), gain):
            return
        below.sort(key=self._policy.rank)
        while below and not self._starts(head, self.num_running):
            self._preempt(below.pop())

    def _starts(self, request: Request, running: int, gain: np.ndarray | int = 0) -> bool:
        """Whether `request` could start beside `running` others if `gain` more blocks were free."""
        if running >= min(len(self._running), self._budget):
            return False
        hit, end, count = self._start_point(request, self._budget)
        ends = (end, hit * self.kv.block_size + count)
        shortage = self.kv.shortage(request.blocks, hit, ends, running)
        return bool((np.asarray(shortage) <= gain).all())

    def _build(self, rows: np.ndarray) -> StepPlan | None:
        decodes = len(rows)
        chunks, self._chunks = self._chunks, []
        if chunks:
            rows = np.concatenate([rows, np.array([row for row, _ in chunks], np.int32)])
        if not len(rows):
            return None
        num_new = np.ones(len(rows), np.int32)
        num_new[decodes:] = [count for _, count in chunks]
        num_computed = self._computed[rows]
        known = self._known[rows]
        sample = (num_computed + num_new == known) & (known < self._limit[rows])
        self._computed[rows] = num_computed + num_new
        self._known[rows] = known + sample
        requests = [request for row in rows.tolist() if (request := self._running[row]) is not None]
        for request in requests:
            request.in_flight += 1
        tokens = int(num_new.sum())
        step = _Step(self._next_step, requests, sample.tolist(), num_computed, tokens)
        self._in_flight.append(step)
        self._next_step += 1
        self._stats.steps += 1
        self._stats.step_tokens += tokens
        new_rows, self._new_rows = self._new_rows, []
        return StepPlan(
            step_id=step.step_id,
            rows=rows,
            num_computed=num_computed,
            num_new=num_new,
            sample=sample,
            num_decode=decodes,
            new_rows=new_rows,
            block_updates=self.kv.take_updates(),
        )

    # ---- a result is here

    def complete(self, result: StepResult) -> list[RequestOutput]:
        """Enter the result of the oldest step in flight; what its requests' clients get."""
        step = self._in_flight.popleft()
        if result.step_id != step.step_id:
            raise RuntimeError(f"step {step.step_id} was due, the worker answered {result.step_id}")
        for request in step.requests:
            request.in_flight -= 1
        if step.void:
            return []
        if result.error:
            return self._step_failed(step, result)
        self._step_passed()
        for index, entries in result.prompt_logprobs.items():
            self._keep_prompt_logprobs(step.requests[index], int(step.num_computed[index]), entries)
        outputs, accepted = [], 0
        not_finite = set(result.nan_rows)
        logprobs = result.logprobs
        found = zip(step.requests, step.sample, result.token_ids.tolist(), strict=True)
        for index, (request, samples, token) in enumerate(found):
            if request.finished:
                continue
            if index in not_finite or (samples and token < 0):
                outputs.append(self._end(request, "error", NOT_FINITE))
                self.kv.forget(request.blocks)
            elif samples:
                outputs.append(self._accept(request, token, logprobs.get(index)))
                accepted += 1
            elif self._prompt_done(request):
                outputs.append(self._end(request, "length"))
        self._stats.generated_tokens += accepted
        return outputs

    def _accept(
        self, request: Request, token: int, logprobs: TokenLogprobs | None
    ) -> RequestOutput:
        tokens, sampling = request.tokens, request.sampling
        tokens.append(token)
        output = RequestOutput(request.request_id, [token])
        if logprobs is not None:
            output.logprobs = [logprobs]
        if not request.answered:
            self._fill_first(request, output)
        if token in sampling.stop_token_ids and request.output_len > sampling.min_tokens:
            output.finish_reason = "stop"
            output.stop_token_id = token
            self._retire(request)
        elif len(tokens) >= request.limit:
            output.finish_reason = "length"
            self._retire(request)
        return output

    def _fill_first(self, request: Request, output: RequestOutput) -> None:
        request.answered = True
        output.cached_tokens = request.cached_tokens
        output.queued_s = request.queued_s
        output.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []

    def _prompt_done(self, request: Request) -> bool:
        """A request for zero tokens is done when all of its prompt that has a successor is computed."""
        return (
            request.limit == request.prompt_len
            and request.row != NO_ROW
            and not request.in_flight
            and bool(self._computed[request.row] == request.limit - 1)
        )

    def _keep_prompt_logprobs(
        self, request: Request, start: int, entries: list[TokenLogprobs]
    ) -> None:
        if not request.finished and not request.answered:
            # A preempted request computes its prompt again: what it has from `start` on is replaced.
            request.prompt_logprobs[start:] = entries

    def _step_passed(self) -> None:
        if self._budget < self._settings.max_num_batched_tokens:
            self._good_steps += 1
            if self._good_steps >= _STEPS_TO_RECOVER:
                self._good_steps = 0
                self._budget = min(2 * self._budget, self._settings.max_num_batched_tokens)

    def _step_failed(self, step: _Step, result: StepResult) -> list[RequestOutput]:
        """The workers' rows and whatever the step and those behind it wrote are in doubt: all running requests are
        sent again, later results are ignored and the prefix cache forgets everything.

        With `retry` the next steps are half as large, down to one token; else, or if that failed too, the requests
        of the step fail and the others go on.
        """
        for later in self._in_flight:
            later.void = True
        outputs = []
        if result.retry and step.tokens > 1:
            self._budget = max(1, min(self._budget, step.tokens // 2))
            self._good_steps = 0
        else:
            error = f"the step that computed this request failed: {result.error}"
            outputs = [self._end(r, "error", error) for r in step.requests if not r.finished]
        for request in list(self._running):
            if request is not None:
                self._preempt(request)
        self.kv.forget_all()
        return outputs
