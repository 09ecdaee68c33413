"""A step for which the device has no memory is made smaller: its requests are preempted, and answered all the same."""

from __future__ import annotations

import weakref

import pytest
import torch

from headrace.engine.runner.runner import PendingStep
from headrace.engine.workers.serve import is_out_of_memory
from headrace.engine.workers.worker import Worker
from tests.engine.driver import LocalEngine, greedy
from tests.engine.tiny_models import make_tiny, prompt

PROMPTS = [prompt(length) for length in (90, 3, 60, 17)]
ROOM = 20  # tokens of a step


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)  # fmt: skip
def test_what_counts_as_too_little_memory(error, memory):
    assert is_out_of_memory(error) is memory


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("when", ["started", "waited for"])
def test_answers_are_those_of_a_device_with_memory(tmp_path, monkeypatch, caplog, when, overlap):
    make_tiny("llama", tmp_path)
    settings = {"max_num_batched_tokens": 128, "overlap": overlap}
    with LocalEngine(tmp_path, **settings) as engine:
        wanted = [answer.tokens for answer in engine.run(PROMPTS, greedy(16))]
    failed: list[int] = []
    taken: list[weakref.ref[torch.Tensor]] = []
    launch, result = Worker.launch, PendingStep.result

    def needs_memory(plan) -> None:
        if plan.step_id >= 0 and plan.num_tokens > ROOM:  # not the dummy steps of the start
            # what a step that fails has taken is given back before the next one, whoever keeps the records of the log
            assert all(ref() is None for ref in taken)
            mine = torch.zeros(8)
            taken.append(weakref.ref(mine))
            failed.append(plan.num_tokens)
            try:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
            except torch.OutOfMemoryError as error:
                raise RuntimeError("out of memory in a graph") from error

    def started(worker: Worker, plan):
        needs_memory(plan)
        return launch(worker, plan)

    def waited_for(pending: PendingStep):
        needs_memory(pending.plan)
        return result(pending)

    if when == "started":
        monkeypatch.setattr(Worker, "launch", started)
    else:
        monkeypatch.setattr(PendingStep, "result", waited_for)
    with LocalEngine(tmp_path, **settings) as engine:
        answers = engine.run(PROMPTS, greedy(16))
    assert max(failed) > 64 and len(failed) > 1 and caplog.text.count("Tried to allocate") > 1
    assert all(ref() is None for ref in taken)
    assert [answer.tokens for answer in answers] == wanted
    assert {answer.reason for answer in answers} == {"length"}
