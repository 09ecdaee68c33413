"""Captured decode steps: buckets of batch sizes over static buffers owned by the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from headrace.engine.models.base import Model, StepContext
from headrace.engine.runner.batch import StaticInputs, StepInputs
from headrace.platforms.collectives import Collectives
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.graph import Graph, GraphKey, GraphSupport, GraphTraits


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
    """Graphs for steps of one query token a request. Empty where the device or the kernels allow none."""

    model: Model
    runtime: DeviceRuntime
    static: StaticInputs
    warm: bool  # run a body once before it is captured: kernels are then loaded and tuned outside of the capture
    _captured: dict[int, tuple[Graph, _Body]] = field(default_factory=dict)

    def bucket(self, num_reqs: int) -> int:
        """The smallest captured size that holds the step; 0 = none."""
        return min((size for size in self._captured if size >= num_reqs), default=0)

    def capture(
        self,
        sizes: Sequence[int],
        inputs: Callable[[int], StepInputs],
        progress: Callable[[float, float, str], None],
    ) -> None:
        """`inputs(size)` builds a dummy step. Largest first: smaller graphs then fit the pool that it made."""
        backend = self.runtime.graphs()
        with backend.session():
            for done, size in enumerate(sorted(sizes, reverse=True)):
                progress(done, len(sizes), f"graph of {size} requests")
                step = inputs(size)
                body = _Body(self.model, step, self.runtime.device)
                if self.warm:
                    body.plan(step)
                    body()
                body.plan(step)
                key = GraphKey("decode", size, size)
                self._captured[size] = backend.capture(key, body, step.view.host_args()), body

    def replay(self, size: int, step: StepInputs) -> torch.Tensor:
        """Hidden states [size, hidden] of a step padded to `size`; valid until the next replay."""
        graph, body = self._captured[size]
        body.plan(step)
        graph.replay(step.view.host_args())
        return body.hidden

    def release(self) -> None:
        for graph, _ in self._captured.values():
            graph.release()
        self._captured.clear()


def bucket_sizes(
    model: Model, collectives: Collectives, traits: GraphTraits, max_reqs: int
) -> list[int]:
    """1, 2, 4, 8, 12, 16, 24, 32, ... up to the largest batch; none when a part of the step cannot be captured.

    A step is padded to the next size, by a third at most from 8 on: padding is computed like anything else.
    """
    support = min((impl.graph for impl in model.attention_impls), default=GraphSupport.NEVER)
    if support == GraphSupport.NEVER or not collectives.capture_safe:
        return []
    powers = [1 << power for power in range((max_reqs - 1).bit_length() + 1)]
    between = [power + power // 2 for power in powers if 8 <= power < max_reqs]
    sizes = sorted(powers + between)
    enough = next(i for i, size in enumerate(sizes) if size >= max_reqs)
    sizes = sizes[: enough + 1]
    return sizes[: traits.max_graphs] if traits.max_graphs is not None else sizes
