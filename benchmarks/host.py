"""Processor time that a worker's thread takes for one captured decode step, with a model that computes nothing.

    python benchmarks/host.py [--steps 400] [--json FILE]

A device's streams and graphs are stood in for: replays do nothing, copies are the host's own. What is left is the
host's work for a step: entering the plan, packing and sending its inputs, planning attention, fetching and reading the
tokens, two steps in flight. Each request changes its block table every 32 steps.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from headrace.cli.bench.record import record, write_json
from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.step import NewRow, StepPlan
from headrace.engine.runner.graphs import RunnerLimits
from headrace.engine.runner.runner import PendingStep, Runner
from headrace.engine.runner.sampler import SamplingOps
from headrace.platforms.batch import BatchView, HostArgs
from headrace.platforms.collectives import SoloCollectives
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.cpu.runtime import CpuRuntime
from headrace.platforms.graph import Graph, GraphBackend, GraphKey, GraphSupport, GraphTraits
from headrace.platforms.kv_layout import CANONICAL, KVGroup, KVPlan, KVSpec
from headrace.platforms.reference.sampling import logprobs, penalties, sample

SEQS, CONTEXT, BLOCK, VOCAB = 256, 8192, 32, 64


class NoGraph(Graph):
    def replay(self, host: HostArgs) -> None:
        return None

    def release(self) -> None:
        return None


class NoGraphs(GraphBackend):
    traits = GraphTraits(host_args=False, max_graphs=None, shares_pool=True)

    def session(self) -> Any:
        return nullcontext()

    def capture(self, key: GraphKey, body: Any, host: HostArgs) -> Graph:
        return NoGraph()


class Streams(CpuRuntime):
    def stream(self) -> Any:
        return object()

    def use_stream(self, stream: Any) -> Any:
        return nullcontext()

    def graphs(self) -> GraphBackend:
        return NoGraphs()


class NoAttention:
    graph = GraphSupport.DECODE_ONE
    reads_tables = False

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> Any:
        return batch.block_tables[group], batch.slot_mappings[group], batch.seq_lens


class NoModel:
    spec = SimpleNamespace(vocab=VOCAB)
    kv_specs = (KVSpec(1, 8, 8, "float32"),)

    def __init__(self) -> None:
        self.attention_impls = [NoAttention()]
        self.plan_keys = [(self.attention_impls[0], 0)]

    def bind_kv(self, plan: KVPlan, caches: Any) -> None:
        return None

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, step: Any) -> torch.Tensor:
        return torch.zeros(len(token_ids), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), VOCAB)


class Sampling:
    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return sample(*args)

    def guarded(self, logits: torch.Tensor, *options: Any) -> torch.Tensor:
        return torch.zeros(len(logits), dtype=torch.int32)


def decode(count: int, step: int, params: SamplingParams) -> StepPlan:
    """Step `step` of `count` requests, which arrive in step 0."""
    rows = np.arange(count, dtype=np.int32)
    due = np.flatnonzero((rows + step) % BLOCK == 0)
    index = np.full(len(due), 1 + step // BLOCK)
    updates = np.stack([np.zeros_like(due), rows[due], index, 1 + due], -1).astype(np.int32)
    one = np.ones(count, np.int32)
    token = np.zeros(1, np.int32).tobytes()
    new = [] if step else [NewRow(row, str(row), token, 1, params) for row in range(count)]
    return StepPlan(step, rows, one * step, one, one > 0, count, new, updates)


def measure(count: int, steps: int, params: SamplingParams) -> dict[str, Any]:
    model: Any = NoModel()
    ops = SamplingOps(Sampling(), logprobs, penalties)
    runtime = Streams(CpuPlatform.probe()[0])
    limits = RunnerLimits(SEQS, 8192, CONTEXT)
    runner = Runner(model, ops, runtime, SoloCollectives(), limits)
    runner.init_kv(KVPlan(CANONICAL, BLOCK, "float32", (KVGroup(0, (0,), 0, 1024),)))
    runner.warm_up(lambda done, total, text: None)
    pending: list[PendingStep] = []
    taken = []
    for step in range(steps):
        plan = decode(count, step, params)
        began = time.thread_time()
        pending.append(runner.launch(plan))
        if len(pending) > 1:
            pending.pop(0).result()
        taken.append(time.thread_time() - began)
    return {"requests": count, "microseconds": round(1e6 * median(taken[steps // 4 :]), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="steps of each case")
    parser.add_argument("--json", default="", metavar="FILE", help="also write the result here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = {
        "greedy": SamplingParams(temperature=0.0),
        "drawn": SamplingParams(temperature=1.0, top_p=0.9, seed=1),
    }
    results = [
        {"case": case, **measure(count, arguments.steps, params)}
        for case, params in cases.items()
        for count in (1, 32, 128, 256)
    ]
    data = record("benchmarks/host.py", {"steps": arguments.steps}, results)
    print(json.dumps(data, indent=2))
    if arguments.json:
        write_json(arguments.json, data)


if __name__ == "__main__":
    main()
