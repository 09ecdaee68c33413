"""The worker's loop: a step that comes while another runs is started at once, results keep their order."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest

from headrace.engine.core.step import StepPlan, StepResult
from headrace.engine.workers import serve
from headrace.engine.workers.messages import Close


class Device:
    """A worker whose steps run until they are let go."""

    def __init__(self, setup, report) -> None:
        self.launched: SimpleQueue[int] = SimpleQueue()
        self.done: dict[int, threading.Event] = {}

    def launch(self, plan):
        done = self.done[plan.step_id] = threading.Event()
        self.launched.put(plan.step_id)

        def result() -> StepResult:
            assert done.wait(10)
            return StepResult(plan.step_id, np.zeros(0, np.int32), {}, {}, [])

        return SimpleNamespace(ready=done.is_set, result=result)

    def close(self) -> None:
        return None


def step(number: int) -> StepPlan:
    none = np.zeros(0, np.int32)
    updates = np.zeros((0, 4), np.int32)
    return StepPlan(number, none, none, none, none.astype(bool), 0, [], updates)


@pytest.fixture
def loop(monkeypatch):
    monkeypatch.setattr(serve, "Worker", Device)
    commands: SimpleQueue = SimpleQueue()
    answers: SimpleQueue = SimpleQueue()
    made = serve.WorkerLoop(SimpleNamespace(rank=0, world=1), commands, answers.put)
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    yield made._worker, commands, answers
    for done in made._worker.done.values():
        done.set()
    commands.put(Close())
    thread.join(10)
    assert not thread.is_alive()


def test_a_step_starts_while_another_runs(loop):
    device, commands, answers = loop
    commands.put(step(1))
    assert device.launched.get(timeout=10) == 1
    # long enough for a loop that waits for its only step to be doing so
    threading.Event().wait(0.05)
    commands.put(step(2))
    assert device.launched.get(timeout=10) == 2
    assert answers.empty() and not device.done[1].is_set()


def test_results_come_in_order(loop):
    device, commands, answers = loop
    for number in (1, 2):
        commands.put(step(number))
        assert device.launched.get(timeout=10) == number
    device.done[2].set()
    device.done[1].set()
    assert [answers.get(timeout=10).step_id for _ in range(2)] == [1, 2]
