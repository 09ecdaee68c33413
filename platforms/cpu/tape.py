"""Graphs on the CPU: a step's native calls, recorded once and replayed by one call, with no Python between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from headrace.platforms.batch import HostArgs
from headrace.platforms.cpu.kernels import Arena, Kernels, Tape
from headrace.platforms.graph import EagerGraphs, Graph, GraphBackend, GraphKey, GraphTraits

log = logging.getLogger(__name__)

# Operators that only look at memory in another way: what they give stays true at replay.
_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "view", "_unsafe_view", "split", "split_with_sizes", "slice", "select", "transpose", "permute", "unsqueeze",
        "squeeze", "expand", "detach", "alias", "as_strided", "t", "_reshape_alias", "lift_fresh", "unbind", "chunk",
    )
)  # fmt: skip


class NotCapturable(RuntimeError):
    """The body computes with an operator that the tape does not see."""


class _OnlyViews(TorchDispatchMode):
    """Refuses PyTorch operators that compute: they would run once at capture and be missing at every replay."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name not in _VIEWS:
            raise NotCapturable(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


class TapeGraph(Graph):
    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def replay(self, host: HostArgs) -> None:
        self._tape.run()

    def profile(self) -> list[tuple[str, int]]:
        """(op, nanoseconds) of each native step, in order."""
        return self._tape.profile()

    def release(self) -> None:
        self._tape.keep.clear()


class TapeGraphs(GraphBackend):
    """Tapes of one worker. All of them share an arena: only one runs at a time."""

    traits = GraphTraits(host_args=False, max_graphs=None, shares_pool=True)

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._arena = Arena()

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, key: GraphKey, body: Callable[[], None], host: HostArgs) -> Graph:
        tape = Tape(self._kernels)
        try:
            with self._recording(tape), _OnlyViews():
                body()
        except NotCapturable as reason:
            log.warning(
                "steps of %d requests are not captured: %s is not a native kernel",
                key.num_reqs,
                reason,
            )
            return EagerGraphs().capture(key, body, host)
        return TapeGraph(tape)

    @contextmanager
    def _recording(self, tape: Tape) -> Iterator[None]:
        kernels = self._kernels
        kernels.tape, kernels.arena = tape, self._arena
        try:
            yield
        finally:
            kernels.tape = kernels.arena = None
