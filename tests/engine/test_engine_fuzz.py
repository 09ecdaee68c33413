"""Scheduler and KV cache against the scripted model: random traffic, tiny pools, and the tokens must be the ones that
each request gets alone without any cache."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from headrace.engine.config.settings import SchedulerSettings
from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.step import StepResult, decode_plan, decode_result, encode
from headrace.engine.ipc.messages import RequestOutput, Submit
from headrace.engine.kv_cache.cache import KVCache
from headrace.engine.scheduler.scheduler import Scheduler
from headrace.platforms.kv_layout import CANONICAL, KVGroup, KVPlan
from tests.engine.scripted_executor import Script, ScriptedModel, expected_tokens

CONTEXT = 60
REQUESTS = 40


@dataclass
class Traffic:
    """One random run. Everything about it follows from `seed` and the fields."""

    seed: int
    windows: tuple[int, ...] = (0,)
    blocks: int = 20
    block_size: int = 4
    budget: int = 16
    rows: int = 6
    depth: int = 2
    caching: bool = True
    policy: str = "fcfs"
    abort_share: float = 0.05
    shared_prompt: float = 0.8  # share of requests that have something in common with others
    script: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.model_script = Script(vocab=50, windows=self.windows, **self.script)
        groups = tuple(
            KVGroup(w, tuple(i for i, x in enumerate(self.windows) if x == w), 1, self.blocks)
            for w in sorted(set(self.windows))
        )
        plan = KVPlan(CANONICAL, self.block_size, "float32", groups)
        self.kv = KVCache(plan, self.caching)
        settings = SchedulerSettings(
            max_num_seqs=self.rows, max_num_batched_tokens=self.budget, policy=self.policy
        )
        self.scheduler = Scheduler(settings, self.kv, CONTEXT, 50)
        self.model = ScriptedModel(self.model_script, plan, self.rows, CONTEXT)
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.last: dict[str, RequestOutput] = {}
        self.cached = 0
        self.pending: deque[StepResult] = deque()
        self.steps = 0
        self.base = [self.rng.randrange(50) for _ in range(40)]

    def make_prompt(self) -> list[int]:
        """New, or a beginning that others share, or one that was there, or equal blocks behind unlike beginnings."""
        rng = self.rng
        kind = rng.random() / self.shared_prompt
        if kind < 0.2 and self.requests:
            return self.requests[rng.choice(list(self.requests))][0]
        if kind < 0.4:
            halves = [self.base[:4], self.base[4:8]]
            return [token for half in rng.choices(halves, k=rng.randrange(1, 10)) for token in half]
        shared = self.base[: rng.randrange(1, 40)] if kind < 1 else []
        return shared + [rng.randrange(50) for _ in range(rng.randrange(1, 12))]

    def make_request(self, name: str) -> None:
        rng = self.rng
        prompt = self.make_prompt()
        stops = (rng.randrange(50),) if rng.random() < 0.3 else ()
        params = SamplingParams(
            max_tokens=rng.randrange(1, 25), stop_token_ids=stops, min_tokens=rng.randrange(4)
        )
        self.requests[name] = (prompt, params)
        submit = Submit(
            name,
            np.array(prompt, np.int32).tobytes(),
            params,
            priority=rng.randrange(3),
            cache_salt=rng.choice(["", "", "x"]),
            adapter_id=0,
        )
        refused = self.scheduler.add(submit)
        assert refused is None or refused.error
        self.take([refused] if refused else [])

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.last, "an output after the last one"
            self.tokens[output.request_id] += output.token_ids
            self.cached += output.cached_tokens
            if output.finish_reason:
                self.last[output.request_id] = output
        assert self.scheduler.problems() == []

    def run(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        while len(self.requests) < REQUESTS or scheduler.has_unfinished or self.pending:
            if len(self.requests) < REQUESTS and rng.random() < 0.6:
                self.make_request(str(len(self.requests)))
            if self.requests and rng.random() < self.abort_share:
                self.take(scheduler.abort([rng.choice(list(self.requests))]))
            while len(self.pending) < self.depth and (plan := scheduler.schedule()) is not None:
                self.pending.append(self.model.run(decode_plan(encode(plan))))
                self.steps += 1
                assert scheduler.problems() == []
                assert plan.num_tokens <= self.budget
            assert self.pending or not scheduler.has_unfinished, "stalled"
            if self.pending and rng.random() < 0.9:
                result = decode_result(encode(self.pending.popleft()))
                self.take(scheduler.complete(result))
            assert self.steps < 20_000, "no end in sight"
        assert self.kv.used_blocks == 0

    def check(self) -> Counter[str]:
        """Every request ended once and with the tokens it gets alone; returns how they ended."""
        assert set(self.last) == set(self.requests)
        room = min(CONTEXT, self.kv.room(self.budget))
        for name, (prompt, params) in self.requests.items():
            reason, got = self.last[name].finish_reason, self.tokens[name]
            if reason == "error":
                continue
            count = min(params.max_tokens, room - len(prompt))
            expected = expected_tokens(prompt, count, self.model_script)
            for index, token in enumerate(expected):
                if token in params.stop_token_ids and index >= params.min_tokens:
                    expected = expected[: index + 1]
                    break
            if reason == "abort":
                assert got == expected[: len(got)], name
            else:
                assert got == expected, name
                stopped = expected[-1] in params.stop_token_ids and len(got) > params.min_tokens
                assert reason == ("stop" if stopped else "length"), name
        return Counter(output.finish_reason for output in self.last.values())


WINDOWS = [(0,), (0, 5, 9), (7,), (0, 3), (0, 16, 0, 4)]


@pytest.mark.parametrize("seed", range(30))
def test_random_traffic(seed: int):
    traffic = Traffic(
        seed,
        windows=WINDOWS[seed % 5],
        caching=seed % 3 != 0,
        policy=("fcfs", "priority")[seed % 2],
        depth=1 + seed % 2,
    )
    traffic.run()
    assert traffic.check()["length"] > 0


@pytest.mark.parametrize("seed", range(12))
def test_preemption_storm(seed: int):
    """Every pool barely holds one full request; the rest fight for it."""
    windows = WINDOWS[seed % 5]
    traffic = Traffic(
        seed,
        windows=windows,
        blocks=1 + CONTEXT // 4,
        rows=8,
        budget=12,
        policy=("fcfs", "priority")[seed % 2],
        caching=seed % 4 < 2,
    )
    traffic.run()
    traffic.check()
    if 0 in windows:  # a window alone needs too little to be short of it
        assert traffic.scheduler.stats().preemptions > 0


@pytest.mark.parametrize("block_size", [1, 2, 7, 64])
@pytest.mark.parametrize("budget", [1, 5, 64])
def test_block_and_chunk_sizes(block_size: int, budget: int):
    traffic = Traffic(
        3,
        windows=(0, 6),
        block_size=block_size,
        blocks=2 + 150 // block_size,
        budget=budget,
        abort_share=0,
    )
    traffic.run()
    assert "abort" not in traffic.check()


@pytest.mark.parametrize("seed", range(6))
def test_aborts_everywhere(seed: int):
    traffic = Traffic(seed, windows=WINDOWS[seed % 5], abort_share=0.5, depth=2)
    traffic.run()
    assert traffic.check()["abort"] > 5


@pytest.mark.parametrize("windows", WINDOWS)
def test_cache_on_and_off_give_the_same_tokens(windows: tuple[int, ...]):
    """Case 120, engine part: prompts that share prefixes, all outputs equal, and the cache was used."""
    runs = [
        Traffic(7, windows=windows, caching=caching, abort_share=0, blocks=60, shared_prompt=1.0)
        for caching in (True, False)
    ]
    for traffic in runs:
        traffic.run()
        traffic.check()
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].cached > 0 and runs[1].cached == 0


@pytest.mark.parametrize("seed", range(8))
def test_failed_steps_hurt_only_their_own_requests(seed: int):
    fails = tuple(random.Random(seed).sample(range(100), 4))
    traffic = Traffic(seed, windows=WINDOWS[seed % 5], script={"fail_steps": fails}, abort_share=0)
    traffic.run()
    ends = traffic.check()
    failed = [o.error for o in traffic.last.values() if "scripted failure" in o.error]
    assert 0 < len(failed) <= 4 * traffic.rows
    assert ends["length"] + ends["stop"] > 0


@pytest.mark.parametrize("seed", range(6))
def test_steps_that_only_pass_when_small_harm_nobody(seed: int):
    traffic = Traffic(
        seed, windows=WINDOWS[seed % 5], script={"fail_above": 7}, abort_share=0, budget=32
    )
    traffic.run()
    traffic.check()
    assert not any("failed" in output.error for output in traffic.last.values())


@pytest.mark.parametrize("seed", range(6))
def test_a_request_that_is_not_finite_harms_nobody(seed: int):
    """Requests whose tokens include 13 have no finite logits, and others share prefixes with them."""
    traffic = Traffic(seed, script={"nan_token": 13}, abort_share=0, windows=WINDOWS[seed % 5])
    traffic.run()
    traffic.check()
    for name, (prompt, _) in traffic.requests.items():
        output = traffic.last[name]
        refused = "tokens" in output.error
        assert refused or ("finite" in output.error) == (13 in prompt), name
