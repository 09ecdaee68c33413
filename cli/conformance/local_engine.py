"""The engine without its process: a real executor, the real scheduler and KV cache, requests in, tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.engine.config.settings import (
    CacheSettings,
    DeviceSettings,
    EngineConfig,
    GraphSettings,
    ModelSettings,
    SchedulerSettings,
)
from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.step import TokenLogprobs
from headrace.engine.ipc.messages import Submit
from headrace.engine.kv_cache.cache import KVCache
from headrace.engine.kv_cache.plan import make_kv_plan
from headrace.engine.scheduler.scheduler import Scheduler
from headrace.engine.weights.sources import read_spec, resolve_model
from headrace.engine.workers.start import make_executor
from headrace.platforms.device import DeviceInfo

CACHE_BYTES = 64 << 20
STEP_SECONDS = 240.0  # a first step may compile kernels


def config_for(model: Path | str, **settings: Any) -> EngineConfig:
    """Settings by their own names, each put into its section; small and quick unless told otherwise."""
    values = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 256,
        "threads": 1,  # several would spin against each other on a busy machine
        "block_size": 16,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        **settings,
    }
    sections: dict[str, Any] = {}
    for name, kind in (
        ("model", ModelSettings),
        ("device", DeviceSettings),
        ("cache", CacheSettings),
        ("scheduler", SchedulerSettings),
        ("graphs", GraphSettings),
    ):
        own = {key: values.pop(key) for key in kind.__struct_fields__ if key in values}
        sections[name] = kind(**own)
    if values:
        raise ValueError(f"no such settings: {values}")
    return EngineConfig(**sections)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached: int = 0
    reason: str = ""
    error: str = ""


class LocalEngine:
    """A context manager: the executor is started on entry and closed on exit."""

    def __init__(self, model: Path | str, device: DeviceInfo, **settings: Any) -> None:
        self.config = config_for(model, **settings)
        files = resolve_model(self.config.model)
        self.spec = read_spec(files)
        self.executor = make_executor(self.config, files, self.spec, device)
        self.phases: list[str] = []

    def __enter__(self) -> LocalEngine:
        try:
            self.info = self.executor.start(self._progress)
            config, scheduler = self.config, self.config.scheduler
            self.plan = make_kv_plan(
                self.info.kv_specs,
                self.info.kv_formats,
                CACHE_BYTES,
                config.cache,
                config.model.max_model_len,
                scheduler.max_num_batched_tokens,
            )
            self.executor.init_kv(self.plan, self._progress)
        except BaseException:
            self.executor.close()
            raise
        cache = KVCache(self.plan, config.cache.prefix_caching)
        self.scheduler = Scheduler(scheduler, cache, config.model.max_model_len, self.info.vocab)
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.close()

    def _progress(self, phase: str, done: float, total: float, text: str) -> None:
        if phase not in self.phases:
            self.phases.append(phase)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        steps_between: int = 0,
    ) -> list[Answer]:
        """The answers in the order of the prompts. RuntimeError when a request is refused or no step ends.

        They come all at once, or one every so many steps, each more urgent than those before it.
        """
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        answers = {str(index): Answer() for index in range(len(prompts))}
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            tokens = np.asarray(prompt, np.int32).tobytes()
            refused = self.scheduler.add(Submit(str(index), tokens, own, priority=-index))
            if refused is not None:
                raise RuntimeError(f"a request was refused: {refused}")
            for _ in range(steps_between):
                if self.scheduler.has_unfinished:
                    self._step(answers)
        while self.scheduler.has_unfinished:
            self._step(answers)
        while self.scheduler.steps_in_flight:  # whatever runs on for requests that have ended
            self._step(answers)
        problems = self.scheduler.problems()
        if problems:
            raise RuntimeError("; ".join(problems))
        return list(answers.values())

    def _step(self, answers: dict[str, Answer]) -> None:
        while self.scheduler.steps_in_flight < self.executor.depth:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self.executor.submit(plan)
        result = self.executor.poll(STEP_SECONDS)
        if result is None:
            raise RuntimeError(f"no step ended within {STEP_SECONDS:g} s")
        for output in self.scheduler.complete(result):
            answer = answers[output.request_id]
            answer.tokens += output.token_ids
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            answer.cached = answer.cached or output.cached_tokens
            answer.reason, answer.error = output.finish_reason, output.error


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **params)
