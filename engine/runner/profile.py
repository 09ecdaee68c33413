"""Where a decode step's time goes: one step captured with the head, replayed op by op."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from headrace.engine.core.sampling import SamplingParams
from headrace.engine.models.base import Model, StepContext
from headrace.engine.runner.batch import StaticInputs, StepInputs
from headrace.engine.runner.graphs import StaticBuffers
from headrace.platforms.graph import GraphKey, OpTime

if TYPE_CHECKING:
    from headrace.engine.runner.runner import Runner

REPEATS = 5  # medians are told


class _WithHead:
    """A decode step from token ids to logits, over inputs of fixed address."""

    def __init__(self, model: Model, inputs: StepInputs, device: torch.device) -> None:
        self._model, self._inputs = model, inputs
        plans = [
            impl.plan(inputs.view, group, StaticBuffers(device)) for impl, group in model.plan_keys
        ]
        self._context = StepContext(plans)

    def __call__(self) -> None:
        inputs = self._inputs
        hidden = self._model.forward(inputs.token_ids, inputs.positions, self._context)
        self._model.logits(hidden)


def profile_decode(runner: Runner, requests: int, context: int) -> dict[str, Any]:
    """A step of `requests` requests, each of `context` tokens that all lie in the one block that belongs to nobody.

    ops: (op, detail, weight bytes, seconds) in order; step_s: a whole step with sampling; bandwidth: bytes a second
    that the device reads at most, 0 where it is not known. ValueError when it cannot be had.
    """
    limits, runtime = runner.limits, runner.runtime
    if not 1 <= requests <= limits.max_num_seqs:
        raise ValueError(f"requests must be from 1 to {limits.max_num_seqs}, not {requests}")
    if not 1 <= context < limits.max_model_len:
        raise ValueError(f"context must be from 1 to {limits.max_model_len - 1}, not {context}")
    plan = runner.dummy_plan([1] * requests, SamplingParams(temperature=0.0))
    plan = msgspec.structs.replace(plan, num_computed=plan.num_computed + (context - 1))
    steps = [_timed(runner, plan) for _ in range(REPEATS)]
    device = runtime.device
    static = StaticInputs(
        torch.zeros(requests, dtype=torch.int32, device=device),
        [table.new_zeros((requests, table.shape[1])) for table in runner.rows.tables],
    )
    with torch.inference_mode(), runner.on_stream():
        inputs = runner.inputs(plan, requests, static)
        backend = runtime.graphs()
        with backend.session():
            body = _WithHead(runner.model, inputs, device)
            key = GraphKey("profile", requests, requests)
            graph = backend.capture(key, body, inputs.view.host_args())
        runs = [graph.profile() for _ in range(REPEATS)]
        graph.release()
    if not runs[0]:
        raise ValueError(
            "a step of this model is not a list of native calls on this device, so its ops cannot be told apart"
        )
    return {
        "requests": requests,
        "context": context,
        "step_s": median(steps),
        "bandwidth": runtime.read_bandwidth(),
        "ops": [_middle(times) for times in zip(*runs, strict=True)],
    }


def _timed(runner: Runner, plan: Any) -> float:
    began = time.perf_counter()
    runner.launch(plan).result()
    return time.perf_counter() - began


def _middle(times: tuple[OpTime, ...]) -> tuple[str, str, int, float]:
    first = times[0]
    return first.op, first.detail, first.weight_bytes, median(row.seconds for row in times)
