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


@dataclass(slots=True)
class _Captured:
    graph: Graph
    step: StepContext  # what the body reads; its plans are renewed before every replay
    buffers: list[StaticBuffers]  # one for each of the model's plan keys


@dataclass(slots=True)
class DecodeGraphs:
    """Graphs for steps of one query token a request. Empty where the device or the kernels allow none."""

    model: Model
    runtime: DeviceRuntime
    static: StaticInputs
    hidden: torch.Tensor  # [N, hidden]: where every body leaves its result
    _captured: dict[int, _Captured] = field(default_factory=dict)

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
        order = sorted(sizes, reverse=True)
        with backend.session():
            for done, size in enumerate(order):
                progress(done, len(order), f"graph of {size} requests")
                step = inputs(size)
                context = StepContext()
                buffers = [StaticBuffers(self.runtime.device) for _ in self.model.plan_keys]
                body = self._body(size, step, context)
                for _ in range(2):  # kernels are loaded and tuned outside of the capture
                    self._plan(step, context, buffers)
                    body()
                self._plan(step, context, buffers)
                graph = backend.capture(GraphKey("decode", size, size), body, step.view.host_args())
                self._captured[size] = _Captured(graph, context, buffers)

    def replay(self, size: int, step: StepInputs) -> torch.Tensor:
        """Hidden states [size, hidden] of a step that was padded to `size`."""
        captured = self._captured[size]
        self._plan(step, captured.step, captured.buffers)
        captured.graph.replay(step.view.host_args())
        return self.hidden[:size]

    def release(self) -> None:
        for captured in self._captured.values():
            captured.graph.release()
        self._captured.clear()

    def _plan(self, step: StepInputs, context: StepContext, buffers: list[StaticBuffers]) -> None:
        context.plans = [
            impl.plan(step.view, group, static)
            for (impl, group), static in zip(self.model.plan_keys, buffers, strict=True)
        ]

    def _body(self, size: int, step: StepInputs, context: StepContext) -> Callable[[], None]:
        token_ids, positions, out = step.token_ids, step.positions, self.hidden[:size]

        def body() -> None:
            out.copy_(self.model.forward(token_ids, positions, context))

        return body


def bucket_sizes(
    model: Model, collectives: Collectives, traits: GraphTraits, max_reqs: int
) -> list[int]:
    """Powers of two up to the largest batch; none when a part of the step cannot be captured."""
    support = min((impl.graph for impl in model.attention_impls), default=GraphSupport.NEVER)
    if support == GraphSupport.NEVER or not collectives.capture_safe:
        return []
    sizes = [1 << power for power in range((max_reqs - 1).bit_length() + 1)]
    return sizes[: traits.max_graphs] if traits.max_graphs is not None else sizes
