"""From a Boot to a running engine's parts: executor, KV plan, scheduler, and what is told about them."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from headrace.engine.config.settings import EngineConfig
from headrace.engine.config.sizes import format_bytes
from headrace.engine.core.boot import Boot
from headrace.engine.core.executor import Executor, Progress, WorkerFailed, WorkerInfo
from headrace.engine.ipc.messages import EngineProgress, EngineReady
from headrace.engine.kv_cache.cache import KVCache
from headrace.engine.kv_cache.plan import KVPlanError, choose_context, make_kv_plan
from headrace.engine.models.spec import ModelSpec
from headrace.engine.scheduler.scheduler import Scheduler
from headrace.platforms.kv_layout import KVPlan
from headrace.platforms.probe import PlatformError

# Tokens a step when neither the user nor the platform says: enough to keep a device busy in prefill.
DEFAULT_STEP_TOKENS = 2048

_PROGRESS_SECONDS = 0.05


class PhaseClock:
    """Passes progress on, at most every _PROGRESS_SECONDS within a phase, and measures how long each phase takes."""

    def __init__(self, publish: Callable[[EngineProgress], None]) -> None:
        self._publish = publish
        self._phase = "import"  # until the first one is reported: mostly loading libraries
        self._began = time.monotonic()
        self._published = 0.0
        self.seconds: dict[str, float] = {}

    def __call__(self, phase: str, done: float, total: float, text: str) -> None:
        now = time.monotonic()
        if phase != self._phase:
            self._end_phase(now)
            self._phase = phase
            self._began = now
            self._published = 0.0
        if now - self._published >= _PROGRESS_SECONDS or (total and done >= total):
            self._published = now
            self._publish(EngineProgress(phase, done, total, text))

    def stop(self) -> dict[str, float]:
        """Seconds of each phase; no more progress is expected."""
        self._end_phase(time.monotonic())
        return self.seconds

    def _end_phase(self, now: float) -> None:
        took = now - self._began
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + took


@dataclass(slots=True)
class Parts:
    executor: Executor
    scheduler: Scheduler
    ready: EngineReady


def with_step_tokens(config: EngineConfig) -> EngineConfig:
    """`config` with max_num_batched_tokens set, for the scheduler and the workers alike."""
    scheduler = config.scheduler
    if scheduler.max_num_batched_tokens:
        return config
    tokens = max(DEFAULT_STEP_TOKENS, scheduler.max_num_seqs)
    scheduler = msgspec.structs.replace(scheduler, max_num_batched_tokens=tokens)
    return msgspec.structs.replace(config, scheduler=scheduler)


def make_executor(boot: Boot, config: EngineConfig, spec: ModelSpec) -> Executor:
    """The workers' executor, from the factory named in `boot` or the real one. Imported here: it may bring torch.

    WorkerFailed when the settings cannot be carried out on these devices.
    """
    path = boot.executor or "headrace.engine.workers.start:make_executor"
    module, _, name = path.partition(":")
    factory = getattr(importlib.import_module(module), name)
    try:
        return cast(Executor, factory(config, boot.files, spec, boot.device))
    except (ValueError, PlatformError) as error:  # a sentence about the settings or the platform
        raise WorkerFailed(str(error)) from error


def kv_budget(config: EngineConfig, info: WorkerInfo) -> tuple[int, str]:
    """Bytes for the KV cache on each rank, and a note where they are not what was set.

    memory_utilization is a share of what was free before the workers started, so what they hold counts as used. A
    platform's proposal is cut to that share; a user's wish is met or refused with a KVPlanError.
    """
    cache, free = config.cache, info.free_memory
    at_start = free + info.weight_bytes + info.activation_bytes
    share = int(free - (1.0 - cache.memory_utilization) * at_start)
    wanted = cache.kv_cache_memory
    if not wanted:
        return share, ""
    if not config.proposed("cache.kv_cache_memory"):
        _require_free(wanted, info, "--kv-cache-memory-bytes", share, format_bytes(share))
        return wanted, ""
    if wanted <= share:
        return wanted, ""
    return share, (
        f"KV cache cut from {format_bytes(wanted)}: {format_bytes(free)} are free beside the weights, and "
        f"{cache.memory_utilization:.0%} of the free memory is the limit (--gpu-memory-utilization)"
    )


def _require_free(need: int, info: WorkerInfo, flag: str, fits: int, shown: str) -> None:
    """KVPlanError when a KV cache of a size that the user chose cannot be had: memory may be overdrawn unnoticed
    until it is written to."""
    if need > info.free_memory:
        way_out = (
            f"lower it to {shown} or leave it out"
            if fits > 0
            else "free memory or take a smaller model"
        )
        raise KVPlanError(
            f"{flag}: a KV cache of {format_bytes(need)} does not fit the {format_bytes(info.free_memory)} that are "
            f"free on {info.device} beside the weights ({format_bytes(info.weight_bytes)}) and a step "
            f"({format_bytes(info.activation_bytes)}); {way_out}"
        )


def start(boot: Boot, executor: Executor, spec: ModelSpec, clock: Progress) -> Parts:
    """Load, plan the KV cache, warm up. Raises WorkerFailed, KVPlanError or ModelError.

    `executor` was made from the same `boot`; whoever made it closes it.
    """
    config = with_step_tokens(boot.config)
    info = executor.start(clock)
    cache, step_tokens = config.cache, config.scheduler.max_num_batched_tokens
    budget, cut = kv_budget(config, info)
    block_size = 0
    if config.proposed("cache.block_size"):
        block_size, cache = cache.block_size, msgspec.structs.replace(cache, block_size=0)
    context = choose_context(
        info.kv_specs,
        info.kv_formats,
        budget,
        cache,
        config.model.max_model_len,
        spec.max_position,
        step_tokens,
        proposed_block_size=block_size,
    )
    plan = make_kv_plan(
        info.kv_specs,
        info.kv_formats,
        budget,
        cache,
        context.max_model_len,
        step_tokens,
        proposed_block_size=block_size,
    )
    if cache.num_blocks:
        fits = cache.num_blocks * info.free_memory // plan.total_bytes
        _require_free(plan.total_bytes, info, "--num-gpu-blocks-override", fits, str(fits))
    executor.init_kv(plan, clock)
    kv = KVCache(plan, cache.prefix_caching)
    scheduler = Scheduler(config.scheduler, kv, context.max_model_len, info.vocab)
    notes = [note for note in (context.note, cut, *plan.reasons, *info.notes) if note]
    ready = _ready(boot, config, info, plan, scheduler.max_model_len)
    return Parts(executor, scheduler, msgspec.structs.replace(ready, notes=notes))


def _ready(
    boot: Boot, config: EngineConfig, info: WorkerInfo, plan: KVPlan, max_model_len: int
) -> EngineReady:
    selection: list[dict[str, Any]] = info.selection
    return EngineReady(
        device=info.device,
        device_name=boot.device.name,
        dtype=info.dtype,
        kv_dtype=plan.dtype,
        max_model_len=max_model_len,
        block_size=plan.block_size,
        kv_bytes=plan.total_bytes,
        kv_tokens=(plan.groups[0].num_blocks - 1) * plan.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        weight_bytes=info.weight_bytes,
        free_bytes=info.free_memory + info.weight_bytes + info.activation_bytes,
        step_bytes=info.activation_bytes,
        world=config.device.tensor_parallel_size,
        selection=selection,
        phases={},
        graphs=info.graphs,
    )
