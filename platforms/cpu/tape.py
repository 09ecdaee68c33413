"""Graphs on the CPU: a step's native calls, recorded once and replayed by one call, with no Python between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.platforms.batch import HostArgs
from headrace.platforms.cpu.kernels import Arena, Kernels, Tape
from headrace.platforms.graph import EagerGraphs, Graph, GraphBackend, GraphKey, GraphTraits

log = logging.getLogger(__name__)


class NotCapturable(RuntimeError):
    """The body computes with an operator that the tape does not see."""


class _OnlyViews(TorchDispatchMode):
    """Refuses PyTorch operators that compute: they would run once at capture and be missing at every replay.

    What only looks at memory in another way passes: its results share storage with an input.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if func._schema.is_mutable:
            raise NotCapturable(name)
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, Tensor)}
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in known:
                raise NotCapturable(name)
        return result


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
