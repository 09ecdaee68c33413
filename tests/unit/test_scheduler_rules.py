"""The scheduler's rules one by one, with results written by hand: tokens are 1, 2, 3, ... unless a test says so."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from headrace.engine.config.settings import SchedulerSettings
from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.step import StepPlan, StepResult, TokenLogprobs
from headrace.engine.ipc.messages import RequestOutput, Submit
from headrace.engine.kv_cache.cache import KVCache
from headrace.engine.scheduler.scheduler import Scheduler
from headrace.platforms.kv_layout import CANONICAL, KVGroup, KVPlan

VOCAB = 128


class Bench:
    """A scheduler with its worker replaced by `answer`."""

    def __init__(self, blocks: int = 100, block_size: int = 4, **settings):
        values = {"max_num_seqs": 8, "max_num_batched_tokens": 32, **settings}
        context = values.pop("context", 200)
        caching = values.pop("caching", True)
        group = KVGroup(0, (0,), 1, blocks + 1)
        self.kv = KVCache(KVPlan(CANONICAL, block_size, "float32", (group,)), caching)
        self.now = 100.0
        self.scheduler = Scheduler(
            SchedulerSettings(**values), self.kv, context, VOCAB, clock=lambda: self.now
        )
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.last: dict[str, RequestOutput] = {}

    def add(self, name: str, prompt: int | list[int] = 3, priority=0, salt="", **sampling):
        ids = list(range(prompt)) if isinstance(prompt, int) else prompt
        params = SamplingParams(**{"max_tokens": 5, **sampling})
        refused = self.scheduler.add(
            Submit(name, np.array(ids, np.int32).tobytes(), params, priority, salt, arrival=99.0)
        )
        if refused is not None:
            self.take([refused])

    def take(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        for output in outputs:
            assert output.request_id not in self.last, "an output after the last one"
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason:
                self.last[output.request_id] = output
        assert self.scheduler.problems() == []
        return outputs

    def schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        assert self.scheduler.problems() == []
        return plan

    def answer(
        self, plan: StepPlan, tokens: list[int] | None = None, **more
    ) -> list[RequestOutput]:
        ids = np.where(plan.sample, plan.num_computed + plan.num_new, -1) % VOCAB
        if tokens is not None:
            ids = np.array(tokens)
        result = StepResult(plan.step_id, ids.astype(np.int32), {}, {}, [])
        for name, value in more.items():
            setattr(result, name, value)
        return self.take(self.scheduler.complete(result))

    def step(self, **more) -> list[RequestOutput]:
        return self.answer(self.schedule(), **more)

    def finish(self, limit: int = 1000) -> None:
        while self.scheduler.has_unfinished:
            limit -= 1
            assert limit, "a request does not end"
            self.step()

    def reason(self, name: str) -> str:
        return self.last[name].finish_reason

    def running(self) -> set[str]:
        return {r.request_id for r in self.scheduler._running if r is not None}


# ---- making steps


def test_decodes_come_first_then_chunks_fill_the_budget():
    bench = Bench(max_num_batched_tokens=16)
    bench.add("a", 4, max_tokens=20)
    bench.step()
    bench.add("b", [50] * 30)
    plan = bench.schedule()
    assert plan.num_decode == 1
    assert plan.num_new.tolist() == [1, 15]
    assert plan.sample.tolist() == [True, False]
    bench.answer(plan)
    plan = bench.schedule()
    assert plan.num_computed.tolist() == [5, 15] and plan.num_new.tolist() == [1, 15]
    assert plan.sample.tolist() == [True, True]


def test_steps_of_prompts_beside_decodes_have_a_limit_of_their_own():
    bench = Bench(max_num_batched_tokens=16, max_num_mixed_tokens=7)
    bench.add("a", 14, max_tokens=3)
    bench.add("b", [50] * 12)
    plan = bench.schedule()  # nobody decodes yet: prompts fill the step
    assert plan.num_new.tolist() == [14, 2]
    bench.answer(plan)
    plan = bench.schedule()
    assert plan.num_decode == 1 and plan.num_new.tolist() == [1, 6]
    bench.answer(plan)
    bench.add("c", [60] * 9)
    plan = bench.schedule()  # two prompts share it
    assert plan.num_new.tolist() == [1, 4, 2]
    bench.answer(plan)
    plan = bench.schedule()  # "a" has ended, "b" decodes
    assert plan.num_decode == 1 and plan.num_new.tolist() == [1, 6]


def test_prompts_have_a_share_beside_many_decodes():
    bench = Bench(max_num_batched_tokens=32, max_num_mixed_tokens=8, max_num_seqs=12)
    for name in "abcdefgh":
        bench.add(name, 2, max_tokens=20)
    bench.step()
    bench.add("long", [50] * 20)
    assert bench.schedule().num_new.tolist() == [1] * 8 + [2]


def test_a_limit_beside_decodes_above_the_steps_is_the_steps():
    bench = Bench(max_num_batched_tokens=8, max_num_mixed_tokens=100)
    bench.add("a", 3)
    bench.step()
    bench.add("b", [50] * 20)
    assert bench.schedule().num_new.tolist() == [1, 7]


def test_one_token_that_samples_counts_as_decode():
    bench = Bench()
    bench.add("a", 1)
    bench.add("b", 9)
    plan = bench.schedule()
    assert plan.num_decode == 1 and plan.num_new.tolist() == [1, 9]


def test_overlap_assumes_that_everyone_goes_on():
    bench = Bench()
    bench.add("a", 3, max_tokens=10)
    first, second = bench.schedule(), bench.schedule()
    assert second.num_computed.tolist() == [3] and second.num_new.tolist() == [1]
    assert not second.new_rows, "a row is sent once"
    bench.answer(first)
    bench.answer(second)
    assert bench.tokens["a"] == [3, 4]


def test_no_step_is_made_beyond_the_length_limit():
    bench = Bench()
    bench.add("a", 3, max_tokens=2)
    plans = [bench.schedule(), bench.schedule()]
    assert bench.scheduler.schedule() is None
    for plan in plans:
        bench.answer(plan)
    assert bench.reason("a") == "length" and len(bench.tokens["a"]) == 2


def test_token_after_the_end_is_dropped_and_the_row_can_be_reused_at_once():
    bench = Bench(max_num_seqs=1)
    bench.add("a", 3, stop_token_ids=(7,))
    bench.add("b", 4)
    first, second = bench.schedule(), bench.schedule()
    assert bench.answer(first, tokens=[7])[0].finish_reason == "stop"
    third = bench.schedule()  # b in the row of a, while a step with a is in flight
    assert [new.request_id for new in third.new_rows] == ["b"]
    assert bench.answer(second, tokens=[50]) == []
    bench.answer(third)
    assert bench.tokens == {"a": [7], "b": [4]}


def test_rows_never_exceed_the_token_budget():
    """More decoding rows than tokens in a step would leave some behind in every step."""
    bench = Bench(max_num_seqs=8, max_num_batched_tokens=3)
    for name in "abcdef":
        bench.add(name, 5)
    bench.finish()
    assert all(bench.reason(name) == "length" for name in "abcdef")


def test_block_updates_cover_every_position():
    bench = Bench(block_size=4)
    bench.add("a", 10, max_tokens=8)
    table = {}
    while bench.scheduler.has_unfinished:
        plan = bench.schedule()
        table.update({(r, i): b for _, r, i, b in plan.block_updates.tolist()})
        for row, start, count in zip(plan.rows, plan.num_computed, plan.num_new, strict=True):
            assert all(table.get((row, p // 4), 0) > 0 for p in range(start, start + count))
        bench.answer(plan)


# ---- ends


def test_length_and_outputs():
    bench = Bench()
    bench.add("a", 3, max_tokens=4)
    outputs = bench.step()
    assert outputs[0].queued_s == 1.0
    bench.finish()
    assert bench.tokens["a"] == [3, 4, 5, 6] and bench.reason("a") == "length"
    assert bench.kv.used_blocks == 0


def test_stop_token_is_the_last_token():
    bench = Bench()
    bench.add("a", 3, stop_token_ids=(9, 4))
    bench.finish()
    assert bench.tokens["a"] == [3, 4]
    assert bench.last["a"].stop_token_id == 4 and bench.reason("a") == "stop"


def test_stop_token_as_the_last_allowed_one_is_a_stop():
    bench = Bench()
    bench.add("a", 3, max_tokens=2, stop_token_ids=(4,))
    bench.finish()
    assert bench.reason("a") == "stop"


def test_min_tokens_holds_a_stop_back():
    bench = Bench()
    bench.add("a", 3, max_tokens=9, min_tokens=3, stop_token_ids=(4, 6))
    bench.finish()
    assert bench.tokens["a"] == [3, 4, 5, 6]


@pytest.mark.parametrize(("prompt", "tokens"), [(19, 1), (18, 2), (10, 10)])
def test_max_tokens_is_clamped_to_the_room_left(prompt: int, tokens: int):
    """Case 31, engine part: a prompt of context - 1 tokens gives one token and the reason "length"."""
    bench = Bench(context=20)
    bench.add("a", prompt, max_tokens=1000)
    bench.finish()
    assert len(bench.tokens["a"]) == tokens and bench.reason("a") == "length"


@pytest.mark.parametrize("prompt", [20, 21, 60])
def test_prompt_that_leaves_no_room_is_refused_with_both_numbers(prompt: int):
    bench = Bench(context=20)
    bench.add("a", prompt)
    assert bench.reason("a") == "error"
    assert str(prompt) in bench.last["a"].error and "20" in bench.last["a"].error
    assert not bench.scheduler.has_unfinished


def test_prompt_larger_than_the_cache_is_refused():
    bench = Bench(blocks=5, block_size=4)
    bench.add("a", 20)
    assert "20 tokens" in bench.last["a"].error and bench.reason("a") == "error"
    bench.add("b", 19, max_tokens=9)
    bench.finish()
    assert bench.reason("b") == "length" and len(bench.tokens["b"]) == 1


@pytest.mark.parametrize(
    ("ids", "text"), [([], "no tokens"), ([1, 2, -1], "token 2"), ([0, VOCAB], "token 1")]
)
def test_bad_prompts_are_refused_and_harm_nobody(ids: list[int], text: str):
    bench = Bench()
    bench.add("good", 3)
    bench.add("bad", ids)
    assert bench.reason("bad") == "error" and text in bench.last["bad"].error
    bench.finish()
    assert bench.reason("good") == "length"


def test_request_id_in_use_is_an_error():
    bench = Bench()
    bench.add("a")
    with pytest.raises(ValueError, match="in use"):
        bench.add("a")


# ---- log-probabilities of the prompt, and requests for nothing else


def logprobs_of(plan: StepPlan) -> dict[int, list[TokenLogprobs]]:
    return {
        0: [
            TokenLogprobs(p + 1, -float(p + 1), 1, [], [])
            for p in range(plan.num_computed[0], plan.num_computed[0] + plan.num_new[0])
            if p + 1 < 10
        ]
    }


@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("budget", [3, 4, 9, 32])
def test_prompt_logprobs_come_whole_with_the_first_output(max_tokens: int, budget: int):
    bench = Bench(max_num_batched_tokens=budget)
    bench.add("warm", 10)
    bench.finish()
    bench.add("a", 10, max_tokens=max_tokens, prompt_logprobs=1)
    outputs = []
    while bench.scheduler.has_unfinished:
        plan = bench.schedule()
        outputs += bench.answer(plan, prompt_logprobs=logprobs_of(plan))
    assert [entry.token_id for entry in outputs[0].prompt_logprobs] == list(range(1, 10))
    assert outputs[0].cached_tokens == 0, "every position was computed"
    assert all(not output.prompt_logprobs for output in outputs[1:])
    assert len(bench.tokens["a"]) == max_tokens and bench.reason("a") == "length"


def test_preempted_prompt_logprobs_are_complete():
    bench = Bench(max_num_batched_tokens=4)
    bench.add("a", 10, max_tokens=1, prompt_logprobs=1)
    plan = bench.schedule()
    bench.answer(plan, prompt_logprobs=logprobs_of(plan))
    bench.scheduler._preempt(bench.scheduler._running[0])
    outputs = []
    while bench.scheduler.has_unfinished:
        plan = bench.schedule()
        outputs += bench.answer(plan, prompt_logprobs=logprobs_of(plan))
    assert [entry.token_id for entry in outputs[-1].prompt_logprobs] == list(range(1, 10))


def test_zero_tokens_without_logprobs_end_at_the_door():
    bench = Bench()
    bench.add("a", 10, max_tokens=0)
    assert bench.reason("a") == "length" and not bench.scheduler.has_unfinished


def test_logprobs_travel_with_their_token():
    bench = Bench()
    bench.add("a", 3, max_tokens=1, logprobs=0)
    entry = TokenLogprobs(3, -0.5, 1, [], [])
    assert bench.step(logprobs={0: entry})[0].logprobs == [entry]


# ---- the prefix cache


def test_cached_tokens_are_told_and_counted():
    bench = Bench()
    bench.add("a", 11)
    bench.finish()
    bench.add("b", 11)
    bench.finish()
    assert [bench.last[n].cached_tokens for n in "ab"] == [0, 0], "only the first output says it"
    stats = bench.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (22, 8)


def test_choices_of_one_prompt_share_its_blocks_although_they_arrive_together():
    bench = Bench(max_num_batched_tokens=64)
    for name in "abcd":
        bench.add(name, 21, max_tokens=2)
    plan = bench.schedule()
    assert sorted(plan.num_new.tolist()) == [1, 1, 1, 21]
    assert bench.scheduler.stats().kv_used_blocks == 5 + 4
    bench.answer(plan)
    bench.finish()
    assert {tuple(bench.tokens[name]) for name in "abcd"} == {(21, 22)}


def test_answers_can_be_prefixes_of_the_next_turn():
    bench = Bench(block_size=4)
    bench.add("a", 6, max_tokens=7)
    bench.finish()
    turn = [*range(6), *bench.tokens["a"], 60]
    bench.add("b", turn, max_tokens=1)
    outputs = bench.step()
    assert outputs[0].cached_tokens == 12


def test_salts_keep_requests_apart():
    bench = Bench()
    bench.add("a", 12, salt="x")
    bench.finish()
    bench.add("b", 12, salt="y")
    assert bench.step()[0].cached_tokens == 0


def test_not_finite_fails_its_request_alone_and_leaves_nothing_in_the_cache():
    bench = Bench()
    bench.add("good", 6)
    bench.add("bad", [7] * 12)
    plan = bench.schedule()
    bad = plan.rows.tolist().index(plan.new_rows[1].row)
    bench.answer(plan, nan_rows=[bad])
    assert bench.reason("bad") == "error" and "finite" in bench.last["bad"].error
    bench.finish()
    assert bench.reason("good") == "length"
    bench.add("again", [7] * 12)
    assert bench.step()[0].cached_tokens == 0
