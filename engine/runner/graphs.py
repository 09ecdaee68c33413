"""Captured decode steps: buckets of batch sizes over static buffers owned by the engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from headrace.engine.config.settings import GraphSettings
from headrace.engine.models.base import Model, StepContext
from headrace.engine.runner.batch import StaticInputs, StepInputs
from headrace.platforms.collectives import Collectives
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.graph import Graph, GraphKey, GraphSupport, GraphTraits


log = logging.getLogger(__name__)

# Steps of a size that run op by op before it is captured under load: a batch that grows passes many sizes once.
PATIENCE = 3


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


class _Body:
    """What is captured: the model over inputs of fixed address. Its result stays where the capture put it."""

    def __init__(self, model: Model, step: StepInputs, device: torch.device) -> None:
        self._model = model
        self._token_ids, self._positions = step.token_ids, step.positions
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
        self.hidden = self._model.forward(self._token_ids, self._positions, self._context)


@dataclass(slots=True)
class DecodeGraphs:
    """Graphs for steps of one query token a request, captured while the server runs: when a size has been asked for a
    few times, or beforehand when there is nothing else to do. Until then such steps run op by op.

    Ranks see the same steps and calls in the same order, so they capture the same graphs between the same steps.
    """

    model: Model
    runtime: DeviceRuntime
    static: StaticInputs
    sizes: list[int]  # that may be captured, ascending
    # Run a body once before it is captured: kernels are then loaded and tuned outside of the capture. Without streams
    # a capture runs the body, so it costs a step and may as well come at once.
    warm: bool
    _captured: dict[int, tuple[Graph, _Body]] = field(default_factory=dict)
    _asked: dict[int, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self._captured)

    def pick(self, num_reqs: int) -> int:
        """The size that a step of so many requests is to be padded to; 0 = none, run it as it is."""
        size = next((size for size in self.sizes if size >= num_reqs), 0)
        if not size or size in self._captured:
            return size
        asked = self._asked[size] = self._asked.get(size, 0) + 1
        return size if asked > self.warm * PATIENCE else 0

    def next(self) -> int:
        """The size to be captured next when there is time; 0 = none. Small ones first: they gain most, for the host's
        work is the same in all."""
        return next((size for size in self.sizes if size not in self._captured), 0)

    def run(self, size: int, step: StepInputs) -> torch.Tensor:
        """Hidden states [size, hidden] of a step padded to `size`; valid until the next one."""
        if size not in self._captured and not self.capture(size, step):
            body = _Body(self.model, step, self.runtime.device)
            body.plan(step)
            body()
            return body.hidden
        graph, body = self._captured[size]
        body.plan(step)
        graph.replay(step.view.host_args())
        return body.hidden

    def capture(self, size: int, step: StepInputs) -> bool:
        """Capture the size, on any step padded to it. False when that failed: it is not tried again."""
        body = _Body(self.model, step, self.runtime.device)
        if self.warm:
            body.plan(step)
            body()
        body.plan(step)
        backend = self.runtime.graphs()
        try:
            with backend.session():
                key = GraphKey("decode", size, size)
                self._captured[size] = backend.capture(key, body, step.view.host_args()), body
        except Exception as error:
            self.sizes.remove(size)
            log.warning("steps of %d requests run without a graph: %s", size, error)
            return False
        return True

    def release(self) -> None:
        for graph, _ in self._captured.values():
            graph.release()
        self._captured.clear()


def bucket_sizes(
    model: Model,
    collectives: Collectives,
    traits: GraphTraits,
    max_reqs: int,
    settings: GraphSettings,
) -> list[int]:
    """1, 2, 4, 8, 12, 16, 24, 32, ... up to the largest batch; none when a part of the step cannot be captured.

    A step is padded to the next size, by a third at most from 8 on: padding is computed like anything else.
    """
    support = min((impl.graph for impl in model.attention_impls), default=GraphSupport.NEVER)
    if settings.eager or support == GraphSupport.NEVER or not collectives.capture_safe:
        return []
    if settings.sizes:
        sizes = sorted({min(size, max_reqs) for size in settings.sizes})
    else:
        powers = [1 << power for power in range((max_reqs - 1).bit_length() + 1)]
        between = [power + power // 2 for power in powers if 8 <= power < max_reqs]
        sizes = sorted(powers + between)
        enough = next(i for i, size in enumerate(sizes) if size >= max_reqs)
        sizes = sizes[: enough + 1]
    if settings.largest:
        sizes = [size for size in sizes if size <= settings.largest]
    return sizes[: traits.max_graphs] if traits.max_graphs is not None else sizes
