"""Scheduler under pressure: preemption, priorities, aborts, failed steps."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.engine.core.request import NO_ROW
from headrace.engine.scheduler.policy import make_policy
from tests.unit.test_scheduler_rules import Bench


def test_four_requests_that_overflow_the_cache_together_all_finish_as_if_alone():
    """Case 32, engine part."""
    alone = {}
    for name in "abcd":
        bench = Bench(blocks=12)
        bench.add(name, [ord(name)] * 10, max_tokens=30)
        bench.finish()
        alone[name] = bench.tokens[name]
    bench = Bench(blocks=12)
    for name in "abcd":
        bench.add(name, [ord(name)] * 10, max_tokens=30)
    bench.finish()
    assert bench.tokens == alone
    assert {bench.reason(name) for name in "abcd"} == {"length"}
    assert bench.scheduler.stats().preemptions > 0


def test_the_latest_is_preempted_and_comes_back_before_newer_ones():
    bench = Bench(blocks=6, caching=False)
    bench.add("old", 7, max_tokens=13)
    bench.add("young", 6, max_tokens=12)
    bench.step()
    assert bench.running() == {"old", "young"}
    bench.add("newest", 3, max_tokens=2)
    order = []
    while bench.scheduler.has_unfinished:
        plan = bench.schedule()
        order += [new.request_id for new in plan.new_rows]
        bench.answer(plan)
    assert order == ["young", "newest"]
    assert len(bench.tokens["young"]) == 12


def test_preempted_request_is_sent_again_with_its_outputs():
    bench = Bench()
    bench.add("a", 3, max_tokens=5, prompt_logprobs=-1)
    bench.step()
    bench.step()
    bench.scheduler._preempt(bench.scheduler._running[0])
    (new,) = bench.schedule().new_rows
    assert np.frombuffer(new.token_ids, np.int32).tolist() == [0, 1, 2, 3, 4]
    assert new.prompt_len == 3


def test_preempted_request_waits_for_its_results_and_keeps_their_tokens():
    bench = Bench()
    bench.add("a", 3, max_tokens=5)
    first, second = bench.schedule(), bench.schedule()
    request = bench.scheduler._running[0]
    bench.scheduler._preempt(request)
    assert bench.scheduler.schedule() is None, "two tokens of it are not known yet"
    bench.answer(first)
    assert bench.scheduler.schedule() is None
    bench.answer(second)
    (new,) = (plan := bench.schedule()).new_rows
    assert np.frombuffer(new.token_ids, np.int32).tolist() == [0, 1, 2, 3, 4]
    bench.answer(plan)
    bench.finish()
    assert bench.tokens["a"] == [3, 4, 5, 6, 7]


def test_preempted_request_can_end_with_a_result_that_was_in_flight():
    bench = Bench()
    bench.add("a", 3, stop_token_ids=(4,))
    first, second = bench.schedule(), bench.schedule()
    bench.scheduler._preempt(bench.scheduler._running[0])
    bench.answer(first)
    bench.answer(second)
    assert bench.reason("a") == "stop" and not bench.scheduler.has_unfinished
    assert bench.scheduler.schedule() is None


# ---- order


def test_first_come_first_served_ignores_priority():
    bench = Bench(max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 9), ("c", 0)):
        bench.add(name, 3, priority, max_tokens=1)
    bench.finish()
    assert list(bench.last) == ["a", "b", "c"]


def test_priority_orders_the_queue_and_ties_by_arrival():
    bench = Bench(max_num_seqs=1, policy="priority")
    for name, priority in (("a", 5), ("b", 9), ("c", 0), ("d", 5)):
        bench.add(name, 3, priority, max_tokens=1)
    bench.finish()
    assert list(bench.last) == ["c", "a", "d", "b"]


def test_a_better_priority_takes_a_row_from_a_worse_one():
    bench = Bench(max_num_seqs=2, policy="priority")
    bench.add("low", 3, 9, max_tokens=20)
    bench.add("middle", 3, 5, max_tokens=20)
    bench.step()
    bench.add("high", 3, 0, max_tokens=20)
    bench.step()
    assert bench.running() == {"middle", "high"}
    bench.finish()
    assert bench.tokens["low"] == list(range(3, 23))
    assert bench.scheduler.stats().preemptions == 1


def test_a_better_priority_takes_blocks_from_a_worse_one():
    bench = Bench(blocks=10, policy="priority")
    bench.add("low", [9] * 24, 9, max_tokens=10)
    bench.step()
    bench.add("high", 20, 0, max_tokens=10)
    bench.step()
    assert bench.running() == {"high"}
    bench.finish()
    assert {bench.reason("low"), bench.reason("high")} == {"length"}


def test_nobody_is_displaced_in_vain():
    """The better request still would not fit: its place is taken by one that ranks as well."""
    bench = Bench(blocks=10, policy="priority")
    bench.add("equal", [8] * 20, 0, max_tokens=10)
    bench.add("low", [9] * 4, 9, max_tokens=10)
    bench.step()
    bench.add("high", 24, 0, max_tokens=2)
    bench.step()
    assert bench.running() == {"equal", "low"}
    assert bench.scheduler.stats().preemptions == 0


def test_equal_priorities_never_displace_each_other():
    bench = Bench(max_num_seqs=1, policy="priority")
    bench.add("a", 3, 1, max_tokens=6)
    bench.step()
    bench.add("b", 3, 1, max_tokens=6)
    bench.finish()
    assert bench.scheduler.stats().preemptions == 0 and list(bench.last) == ["a", "b"]


def test_a_large_request_at_the_head_is_not_overtaken_for_ever():
    bench = Bench(blocks=20, caching=False)
    for i in range(4):
        bench.add(f"first{i}", 8, max_tokens=8)
    bench.step()
    bench.add("large", 70, max_tokens=5)
    for i in range(50):
        bench.add(f"later{i}", 8, max_tokens=8)
    bench.finish()
    assert list(bench.last).index("large") <= 4


def test_unknown_policy_is_named():
    with pytest.raises(ValueError, match="best-effort"):
        make_policy("best-effort")


# ---- aborts


def test_abort_frees_everything_at_once_while_steps_are_in_flight():
    bench = Bench()
    bench.add("a", 20, max_tokens=50)
    bench.add("b", 20, max_tokens=2, salt="b")
    first, second = bench.schedule(), bench.schedule()
    bench.take(bench.scheduler.abort(["a"]))
    assert bench.reason("a") == "abort" and bench.running() == {"b"}
    assert bench.kv.used_blocks == 5
    bench.answer(first)
    bench.answer(second)
    bench.finish()
    assert bench.tokens["a"] == [] and len(bench.tokens["b"]) == 2
    assert bench.kv.used_blocks == 0


def test_abort_while_queued_and_during_prefill():
    bench = Bench(max_num_seqs=1, max_num_batched_tokens=8)
    bench.add("prefill", 30)
    bench.add("queued", 30)
    bench.step()
    bench.take(bench.scheduler.abort(["queued", "prefill", "unknown"]))
    assert bench.scheduler.stats().waiting == bench.scheduler.stats().running == 0
    assert bench.kv.used_blocks == 0 and bench.scheduler.schedule() is None


def test_abort_twice_answers_once():
    bench = Bench()
    bench.add("a")
    assert len(bench.scheduler.abort(["a", "a"])) == 1
    assert bench.scheduler.abort(["a"]) == []


def test_queue_forgets_aborted_requests_even_behind_a_blocked_head():
    bench = Bench(max_num_seqs=1)
    bench.add("running", 3, max_tokens=100)
    bench.step()
    bench.add("head", 3)
    for i in range(500):
        bench.add(str(i), 3)
        bench.scheduler.abort([str(i)])
    assert len(bench.scheduler._waiting._heap) < 100
    assert [request.request_id for request in bench.scheduler._waiting] == ["head"]


# ---- failed steps


def test_failed_step_fails_its_requests_and_the_others_go_on():
    bench = Bench(max_num_seqs=2)
    for name in "abc":
        bench.add(name, [ord(name)] * 10, max_tokens=4)
    first, second = bench.schedule(), bench.schedule()
    bench.answer(first, error="a kernel failed")
    assert {bench.reason("a"), bench.reason("b")} == {"error"}
    assert "a kernel failed" in bench.last["a"].error
    assert bench.answer(second) == [], "it was computed behind a failed one"
    bench.finish()
    assert bench.reason("c") == "length" and len(bench.tokens["c"]) == 4


def test_names_given_in_a_failed_step_are_taken_back():
    bench = Bench()
    bench.add("a", 12)
    bench.step(error="lost")
    bench.add("b", 12)
    assert bench.step()[0].cached_tokens == 0


def test_a_step_that_may_pass_when_smaller_is_halved_until_it_does():
    bench = Bench(max_num_batched_tokens=32)
    bench.add("a", 30, max_tokens=3)
    bench.add("b", 30, max_tokens=3, salt="b")
    largest = 0
    while bench.scheduler.has_unfinished:
        plan = bench.schedule()
        if plan.num_tokens > 5:
            bench.answer(plan, error="out of memory", retry=True)
        else:
            largest = max(largest, plan.num_tokens)
            bench.answer(plan)
    assert bench.tokens == {"a": [30, 31, 32], "b": [30, 31, 32]}
    assert 2 < largest <= 5
    assert not bench.last["a"].error


def test_a_step_of_one_token_that_fails_is_not_retried_for_ever():
    bench = Bench()
    bench.add("a", 8, max_tokens=3)
    for _ in range(10):
        if not bench.scheduler.has_unfinished:
            break
        bench.step(error="out of memory", retry=True)
    assert bench.reason("a") == "error" and "out of memory" in bench.last["a"].error


def test_the_budget_recovers_after_a_failure():
    bench = Bench(max_num_batched_tokens=32, context=10_000, blocks=3000)
    bench.add("a", 32, max_tokens=1000)
    bench.step(error="out of memory", retry=True)
    assert bench.scheduler._budget == 16
    for _ in range(300):
        bench.step()
    assert bench.scheduler._budget == 32


def test_results_out_of_order_are_a_defect():
    bench = Bench()
    bench.add("a", 3)
    _first, second = bench.schedule(), bench.schedule()
    with pytest.raises(RuntimeError, match="was due"):
        bench.answer(second)


def test_stalled_head_fails_rather_than_waits():
    bench = Bench()
    bench.add("a", 3)
    (output,) = bench.take(bench.scheduler.fail_stalled())
    assert output.finish_reason == "error" and not bench.scheduler.has_unfinished
    assert bench.scheduler.fail_stalled() == []


def test_finished_requests_have_no_row():
    bench = Bench()
    bench.add("a", 3)
    request = bench.scheduler._requests["a"]
    bench.finish()
    assert request.finished and request.row == NO_ROW
