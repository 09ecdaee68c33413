"""Captured steps: decodes and single prompts of a few sizes, over static buffers owned by the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from headrace.engine.config.settings import GraphSettings
from headrace.engine.core.step import StepPlan
from headrace.engine.models.base import Model, StepContext
from headrace.engine.runner.batch import SampleInputs, StaticInputs, StepInputs
from headrace.platforms.collectives import Collectives
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.graph import Graph, GraphKey, GraphSupport, GraphTraits

log = logging.getLogger(__name__)

DECODE, PROMPT = "decode", "prompt"
# Prompts are padded to a multiple: padding is computed like anything else.
PROMPT_STEP = 64
# Steps of a size that run op by op before it is captured under load: a batch that grows passes many sizes once.
PATIENCE = 3


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    max_num_seqs: int  # rows, and requests a step
    max_num_batched_tokens: int  # tokens a step
    max_model_len: int  # tokens a row
    graphs: GraphSettings = field(default_factory=GraphSettings)


class StaticBuffers:
    """Tensors of fixed address, by name. An attention plan asks for its own; the first request sizes it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The buffer of that name, uninitialised at first. ValueError when it was made with another shape or dtype."""
        tensor = self._tensors.get(name)
        if tensor is None:
            tensor = self._tensors[name] = torch.empty(shape, dtype=dtype, device=self._device)
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            raise ValueError(
                f"static buffer {name!r} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"not {tuple(shape)} {dtype}"
            )
        return tensor


# logits [N, V] and inputs -> ids [N] int32, which are in the rows' token pool by then
Choose = Callable[[torch.Tensor, SampleInputs], torch.Tensor]


class Body:
    """What is captured: the model over inputs of fixed address. Its result stays where the capture put it: `hidden`, or
    of a step that is captured from its gathers to what it samples, `raw` logits and `ids` of all its rows."""

    def __init__(
        self, model: Model, step: StepInputs, device: torch.device, choose: Choose
    ) -> None:
        self._model, self._choose = model, choose
        self._token_ids, self._positions = step.token_ids, step.positions
        self._gather, self._sample = step.gather, step.sample
        self.raw = self.ids = torch.empty(0)
        self._context = StepContext()
        self._buffers = [StaticBuffers(device) for _ in model.plan_keys]
        self.hidden = torch.empty(0)

    def plan(self, step: StepInputs) -> None:
        """The attention plans of this step: before every replay, never inside a capture."""
        self._context.plans = [
            impl.plan(step.view, group, static)
            for (impl, group), static in zip(self._model.plan_keys, self._buffers, strict=True)
        ]

    def __call__(self) -> None:
        if self._gather is not None:
            self._gather()
        self.hidden = self._model.forward(self._token_ids, self._positions, self._context)
        if self._gather is not None:
            self.raw = self._model.logits(self.hidden)
            self.ids = self._choose(self.raw, self._sample)


@dataclass(slots=True)
class StepGraphs:
    """Graphs for steps of one query token a request, and of one prompt; captured while the server runs: when a size has
    been asked for a few times, or beforehand when there is nothing else to do. Until then steps run op by op.

    Ranks see the same steps and calls in the same order, so they capture the same graphs between the same steps.
    """

    model: Model
    runtime: DeviceRuntime
    static: StaticInputs
    keys: list[GraphKey]  # that may be captured, those of a phase ascending
    # Run a body once before it is captured: kernels are then loaded and tuned outside of the capture. Without streams
    # a capture runs the body, so it costs a step and may as well come at once.
    warm: bool
    choose: Choose
    _captured: dict[GraphKey, tuple[Graph, Body]] = field(default_factory=dict)
    _asked: dict[GraphKey, int] = field(default_factory=dict)
    # Steps of these are padded all the same: other ranks may have the graph, and all must do the same work.
    _failed: set[GraphKey] = field(default_factory=set)

    @property
    def count(self) -> int:
        return len(self._captured)

    def pick(self, plan: StepPlan) -> GraphKey | None:
        """What the step is to be padded to; None = run it as it is."""
        phase, tokens = DECODE, len(plan.rows)
        if plan.num_decode < tokens:
            if tokens > 1:
                return None
            phase, tokens = PROMPT, int(plan.num_new[0])
        fits = (key for key in self.keys if key.phase == phase and key.num_tokens >= tokens)
        key = next(fits, None)
        if key is None or key in self._captured or key in self._failed:
            return key
        asked = self._asked[key] = self._asked.get(key, 0) + 1
        return key if asked > self.warm * PATIENCE else None

    def next(self) -> GraphKey | None:
        """What is to be captured next when there is time. Small ones first: they gain most, for the host's work is the
        same in all."""
        done = self._captured.keys() | self._failed
        return next((key for key in self.keys if key not in done), None)

    def run(self, key: GraphKey, step: StepInputs) -> Body:
        """A step padded to the key; what it gives is valid until the next one."""
        if key in self._failed or (key not in self._captured and not self.capture(key, step)):
            body = self.body(step)
            body()
            return body
        graph, body = self._captured[key]
        body.plan(step)
        graph.replay(step.view.host_args())
        return body

    def body(self, step: StepInputs) -> Body:
        """Of a step that is ready to be run."""
        body = Body(self.model, step, self.runtime.device, self.choose)
        body.plan(step)
        return body

    def capture(self, key: GraphKey, step: StepInputs) -> bool:
        """Capture, on any step padded to the key. False when that failed: it is not tried again."""
        body = self.body(step)
        if self.warm:
            body()
            body.plan(step)
        backend = self.runtime.graphs()
        try:
            with backend.session():
                self._captured[key] = backend.capture(key, body, step.view.host_args()), body
        except Exception as error:
            self._failed.add(key)
            log.warning("%s steps of %d run without a graph: %s", key.phase, key.num_tokens, error)
            return False
        return True

    def release(self) -> None:
        for graph, _ in self._captured.values():
            graph.release()
        self._captured.clear()


def graph_keys(
    model: Model, collectives: Collectives, traits: GraphTraits, limits: RunnerLimits
) -> list[GraphKey]:
    """What may be captured; nothing when a part of the step cannot be.

    Decodes of 1, 2, 4, 8, 12, 16, 24, 32, ... requests up to the largest batch: a step is padded to the next size, by a
    third at most from 8 on. Prompts, where attention can be captured with them: one, and a request that is padding.
    """
    settings, most = limits.graphs, limits.max_num_seqs
    support = min((impl.graph for impl in model.attention_impls), default=GraphSupport.NEVER)
    if settings.eager or support == GraphSupport.NEVER or not collectives.capture_safe:
        return []
    sizes = sorted({min(size, most) for size in settings.sizes}) or _decode_sizes(most)
    keys = [GraphKey(DECODE, n, n) for n in sizes if n <= (settings.largest or n)]
    if support == GraphSupport.ALWAYS:
        longest = min(settings.prompt, limits.max_num_batched_tokens, limits.max_model_len)
        keys += [GraphKey(PROMPT, 2, n) for n in range(PROMPT_STEP, longest + 1, PROMPT_STEP)]
    return keys[: traits.max_graphs] if traits.max_graphs is not None else keys


def _decode_sizes(most: int) -> list[int]:
    powers = [1 << power for power in range((most - 1).bit_length() + 1)]
    sizes = sorted(powers + [n + n // 2 for n in powers if 8 <= n < most])
    return sizes[: next(i for i, size in enumerate(sizes) if size >= most) + 1]
