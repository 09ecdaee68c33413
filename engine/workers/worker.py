"""Worker: one rank's device, model and runner, whatever process or thread it lives in."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from headrace.engine.config import env
from headrace.engine.config.settings import CacheSettings, ModelSettings
from headrace.engine.core.executor import WorkerInfo
from headrace.engine.core.step import StepPlan
from headrace.engine.kv_cache.plan import make_kv_plan
from headrace.engine.models.base import BuildContext, Model
from headrace.engine.models.registry import build_model
from headrace.engine.runner.profile import profile_step
from headrace.engine.runner.runner import PendingStep, Runner, RunnerLimits
from headrace.engine.runner.sampler import SamplingOps
from headrace.engine.weights.layout import tensor_shapes
from headrace.engine.weights.online import keeps_blocks, online_schemes, refuse_without_kernel
from headrace.engine.weights.packed import identity, packed_file
from headrace.engine.weights.source import WeightSource
from headrace.engine.weights.sources import open_source
from headrace.engine.workers.messages import Setup
from headrace.engine.workers.sleep import WEIGHTS_TAG, Sleeper
from headrace.platforms import tuned
from headrace.platforms.collectives import GroupSpec
from headrace.platforms.device import DeviceInfo
from headrace.platforms.groups import open_group
from headrace.platforms.kv_layout import KVPlan
from headrace.platforms.ops import Ops
from headrace.platforms.probe import load_platform
from headrace.platforms.queries import SampleQuery
from headrace.platforms.registry import Policy, Registry

if TYPE_CHECKING:
    from torch.profiler import profile

log = logging.getLogger(__name__)

# (phase, done, total, text)
Report = Callable[[str, float, float, str], None]


PHASES = ("open", "load", "measure", "init_kv", "warm_up")
UTILITIES = ("selection", "reset", "profile", "profile_step", "capture_graph", "sleep", "wake")


class Worker:
    """Phases in order: open, load, measure, init_kv, warm_up; then launch for every step; utilities between steps."""

    def __init__(self, setup: Setup, report: Report) -> None:
        self.setup = setup
        self._report = report
        self._opened = ExitStack()  # closes what the phases have opened, the last first
        self._profile: profile | None = None

    # Phases

    def open(self) -> None:
        """The device, its collectives, and the ops to choose from."""
        setup, device = self.setup, self.setup.device
        self._report("open", 0, 0, device.spec)
        platform = load_platform(device.platform)
        threads = setup.config.device.threads
        self._device = dataclasses.replace(device, units=threads) if threads else device
        self._runtime = platform.open(self._device)
        self._opened.callback(self._runtime.close)
        if setup.config.cache.sleep_mode:
            self._runtime.allocator().allow_sleep()
        measured = tuned.read(env.tuned_file(device.name), device.name)
        if measured.problem:
            log.warning("%s", measured.problem)
        self._runtime.tuned = measured.options
        group = GroupSpec(setup.rank, setup.world, setup.init_method)
        registry, policy = Registry.with_reference(platform.implementations()), policy_of(setup)
        self._ops = Ops(registry, self._device, self._runtime, policy)
        self._collectives = self._opened.enter_context(
            open_group(group, self._runtime, registry, policy, self._ops.report)
        )

    def load(self) -> None:
        """Choose implementations, build the model, read its weights."""
        setup = self.setup
        config, spec = setup.config, setup.spec
        self._dtype_name = config.model.dtype
        if self._dtype_name == "auto":
            self._dtype_name = self._device.dtypes[0]
        dtype = getattr(torch, self._dtype_name)
        kv_dtype = config.cache.kv_cache_dtype
        limits = limits_of(setup)
        source = open_source(setup.files, config.model.hf_overrides, self._runtime)
        try:
            stored = kept_schemes(source, config.model, self._dtype_name, self._device)
            schemes = online_schemes(tensor_shapes(spec), stored, config.model.quantization)
            context = BuildContext(
                self._ops,
                dtype,
                self._collectives,
                self._dtype_name if kv_dtype == "auto" else kv_dtype,
                self._runtime.device,
                schemes,
            )
            model = build_model(spec, context, limits.max_model_len)
            queries = (decision.query for decision in self._ops.report.decisions)
            refuse_without_kernel(config.model.quantization, queries, self._device.spec)
            query = SampleQuery(spec.vocab, limits.max_num_seqs)
            bound = (self._ops.bind(op, query) for op in ("sample", "logprobs", "penalties"))
            sampling = SamplingOps(*bound)
            self._model: Model = model
            model.enter_thread = self._runtime.enter_thread
            with self._kept_packed():
                self._weight_bytes = model.load_weights(source, self._reading)
        finally:
            source.close()
        self._runtime.allocator().adopt(model.loaded(), WEIGHTS_TAG)
        self._runner = Runner(model, sampling, self._runtime, self._collectives, limits)
        self._opened.callback(self._runner.close)

    def _reading(self, done: float, total: float, text: str) -> None:
        self._report("load", done, total, text)

    def _kept_packed(self) -> AbstractContextManager[None]:
        setup, settings = self.setup, self.setup.config.model
        if not settings.packed_cache or setup.files.kind == "dummy":
            return nullcontext()
        path = packed_file(setup.files, setup.rank, setup.world)
        options = (self._dtype_name, settings.quantization, setup.rank, setup.world)
        return self._runtime.packed_weights(path, f"{identity(setup.files)} {options}")

    def measure(self) -> dict[str, Any]:
        """What the largest step takes; WorkerInfo as plain data."""
        setup = self.setup
        self._report("measure", 0, 0, "memory of the largest step")
        formats = [list(impl.kv_formats(impl.query)) for impl in self._model.attention_impls]
        specs = self._model.kv_specs
        few = CacheSettings(num_blocks=2)
        activation = self._runner.measure(make_kv_plan(specs, formats, 0, few, 1, 1))
        info = WorkerInfo(
            device=self._device.spec,
            dtype=self._dtype_name,
            weight_bytes=self._weight_bytes,
            kv_specs=list(specs),
            kv_formats=formats,
            free_memory=max(self._runtime.memory().free - activation, 0),
            activation_bytes=activation,
            vocab=setup.spec.vocab,
            selection=self.selection(),
            notes=self._sleep_notes(),
            graphs=len(self._runner.graph_keys()),
        )
        return msgspec.to_builtins(info)

    def _sleep_notes(self) -> list[str]:
        reason = self._runtime.allocator().stays_awake(WEIGHTS_TAG)
        wanted = self.setup.config.cache.sleep_mode
        return [f"sleep does not free the weights, because {reason}"] if wanted and reason else []

    def init_kv(self, plan: Any) -> None:
        plan = msgspec.convert(plan, KVPlan)
        self._report("kv", 0, plan.total_bytes, "KV cache")
        self._kv = plan
        self._runner.init_kv(plan)
        self._sleeper = Sleeper(self._runtime, self._runner, plan, self._reload)

    def _reload(self) -> None:
        files, overrides = self.setup.files, self.setup.config.model.hf_overrides
        with closing(open_source(files, overrides, self._runtime)) as source:
            tensors = self._model.read_again(source, self._reading)
        self._runtime.allocator().adopt(tensors, WEIGHTS_TAG)

    def warm_up(self) -> None:
        self._runner.warm_up(lambda done, total, text: self._report("warm-up", done, total, text))

    # Steps

    def launch(self, plan: StepPlan) -> PendingStep:
        return self._runner.launch(plan)

    # Utilities

    def selection(self) -> list[dict[str, Any]]:
        """Every decision about an implementation with its candidates and reasons, as plain data."""
        return [
            {**msgspec.to_builtins(decision), "query_type": type(decision.query).__name__}
            for decision in self._ops.report.decisions
        ]

    def capture_graph(self) -> dict[str, Any]:
        """Capture one graph beforehand, if that pays: how many there are, and whether to ask again."""
        more = self._runner.capture_graph()
        return {"graphs": self._runner.captured, "more": more}

    def reset(self) -> None:
        """Forget every request."""
        self._runner.reset()

    def profile(self, action: str, path: str = "") -> str:
        """ "start", then "stop": writes a trace that trace viewers open to `path` and returns the costliest ops."""
        if action == "start":
            if self._profile is not None:
                raise ValueError("a profile is being taken already; stop it first")
            self._profile = torch.profiler.profile()
            self._profile.start()
            return ""
        if action != "stop":
            raise ValueError(f"profile knows start and stop, not {action!r}")
        if self._profile is None:
            raise ValueError("no profile is being taken; start one first")
        taken, self._profile = self._profile, None
        taken.stop()
        if path:
            taken.export_chrome_trace(f"{path}.{self.setup.rank}" if self.setup.world > 1 else path)
        return taken.key_averages().table(sort_by="self_cpu_time_total", row_limit=20)

    def profile_step(
        self, requests: int, context: int, prompt: int = 0, decodes: int = 0
    ) -> dict[str, Any]:
        """Where a step's time goes, op by op; see runner/profile.py. What rows and cache held is lost."""
        sizes = (requests, context, prompt, decodes)
        return profile_step(self._runner, self._ops, self._kv, sizes)

    def sleep(self, level: int) -> dict[str, Any]:
        """Give memory back; see sleep.py."""
        return self._sleeper.sleep(level)

    def wake(self, tags: list[str]) -> None:
        self._sleeper.wake(tags, self.warm_up)

    def close(self) -> None:
        """Whichever phases were reached."""
        self._opened.close()


def kept_schemes(
    source: WeightSource, settings: ModelSettings, dtype: str, device: DeviceInfo
) -> dict[str, str]:
    """The quantized tensors whose blocks should be computed with as they are, with their types."""
    if not keeps_blocks(settings, dtype, device.dtypes[0]):
        return {}
    schemes = ((name, source.get(name).scheme) for name in source.names())
    return {name: scheme for name, scheme in schemes if not hasattr(torch, scheme)}


def policy_of(setup: Setup) -> Policy:
    device = setup.config.device
    return Policy(device.force, frozenset(device.disable), device.only_verified, device.self_test)


def limits_of(setup: Setup) -> RunnerLimits:
    """Rows and buffers. A context left open is the model's own: the engine may then choose any shorter one."""
    scheduler = setup.config.scheduler
    return RunnerLimits(
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        setup.config.model.max_model_len or setup.spec.max_position,
        setup.config.graphs,
    )
