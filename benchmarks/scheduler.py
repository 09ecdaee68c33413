"""How many sequences a second the scheduler alone schedules, on one core. Prints JSON.

    python benchmarks/scheduler.py [--seqs 256] [--seconds 3] [--json FILE]

A sequence is scheduled once for each step it is in. Each case times `schedule` and `complete` with everything they
do for a real step (blocks, prefix names, stop checks, outputs); a loop-back answers each step, and its time is not
counted. Cases: "decode", a full batch that only decodes; "mixed", short requests that come and go with chunked
prefill, and "tight", longer answers with so few blocks that requests are preempted.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

import numpy as np

from headrace.cli.bench.record import record, write_json
from headrace.engine.config.settings import SchedulerSettings
from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.step import StepPlan, StepResult
from headrace.engine.ipc.messages import Submit
from headrace.engine.kv_cache.cache import KVCache
from headrace.engine.scheduler.scheduler import Scheduler
from headrace.platforms.kv_layout import CANONICAL, KVGroup, KVPlan

VOCAB = 50_000
CONTEXT = 8192
BLOCK = 32


class Case:
    """A scheduler, a source of requests and the clock around it."""

    def __init__(self, seqs: int, blocks: int, prompt: tuple[int, int], output: tuple[int, int]):
        group = KVGroup(0, (0,), 1, blocks + 1)
        kv = KVCache(KVPlan(CANONICAL, BLOCK, "float32", (group,)))
        settings = SchedulerSettings(max_num_seqs=seqs, max_num_batched_tokens=2048)
        self.scheduler = Scheduler(settings, kv, CONTEXT, VOCAB)
        self._random = random.Random(0)
        self._numbers = np.random.default_rng(0)
        self._prompt, self._output = prompt, output
        self._made = 0

    def refill(self, waiting: int) -> None:
        while self.scheduler.stats().waiting < waiting:
            length = self._random.randint(*self._prompt)
            tokens = self._numbers.integers(0, VOCAB, length, dtype=np.int32)
            sampling = SamplingParams(
                max_tokens=self._random.randint(*self._output), stop_token_ids=(VOCAB,)
            )
            self.scheduler.add(Submit(str(self._made), tokens.tobytes(), sampling))
            self._made += 1

    def run(self, seconds: float, waiting: int, warm_steps: int) -> dict[str, Any]:
        scheduler = self.scheduler
        answers: list[StepResult] = []
        spent, sequences, steps, step = 0.0, 0, 0, 0
        while spent < seconds and (waiting or scheduler.has_unfinished):
            if waiting and step % 16 == 0:
                self.refill(waiting)
            began = time.perf_counter()
            plan = scheduler.schedule()
            took = time.perf_counter() - began
            if plan is not None:
                answers.append(self._answer(plan))
            if len(answers) > 1 or plan is None:  # two steps in flight, as in the server
                began = time.perf_counter()
                scheduler.complete(answers.pop(0))
                took += time.perf_counter() - began
            step += 1
            if step > warm_steps and plan is not None:
                spent += took
                steps += 1
                sequences += len(plan.rows)
        return {
            "sequences_per_second": round(sequences / spent),
            "sequences_per_step": round(sequences / steps, 1),
            "microseconds_per_step": round(spent / steps * 1e6, 1),
            "steps": steps,
            "preemptions": scheduler.stats().preemptions,
        }

    def _answer(self, plan: StepPlan) -> StepResult:
        ids = self._numbers.integers(0, VOCAB, len(plan.rows), dtype=np.int32)
        return StepResult(plan.step_id, np.where(plan.sample, ids, -1).astype(np.int32), {}, {}, [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqs", type=int, default=256, help="running sequences")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each case")
    parser.add_argument("--json", default="", metavar="FILE", help="also write the result here")
    arguments = parser.parse_args()
    seqs, seconds = arguments.seqs, arguments.seconds
    enough = seqs * CONTEXT // BLOCK

    decode = Case(seqs, enough, (16, 64), (8000, 8000))
    decode.refill(seqs)
    results = [{"case": "decode", **decode.run(seconds, waiting=0, warm_steps=50)}]
    for case, blocks, output in (
        ("mixed", enough, (16, 128)),
        ("tight", seqs * 8, (256, 1024)),
    ):
        source = Case(seqs, blocks, (32, 512), output)
        results.append({"case": case, **source.run(seconds, waiting=64, warm_steps=50)})
    measured = {"seqs": seqs, "seconds": seconds}
    data = record("benchmarks/scheduler.py", measured, results)
    print(json.dumps(data, indent=2))
    if arguments.json:
        write_json(arguments.json, data)


if __name__ == "__main__":
    main()
