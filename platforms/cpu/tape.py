"""Graphs on the CPU: a step's native calls, recorded once and replayed by one call, with no Python between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode

from headrace.platforms.batch import HostArgs
from headrace.platforms.cpu.kernels import Arena, Kernels, Tape
from headrace.platforms.graph import (
    EagerGraphs,
    Graph,
    GraphBackend,
    GraphKey,
    GraphTraits,
    OpTime,
)

log = logging.getLogger(__name__)


class NotCapturable(RuntimeError):
    """The body computes with an operator that the tape does not see."""


class _OnlyViews(TorchFunctionMode):
    """Refuses PyTorch functions that compute: they would run once at capture and be missing at every replay.

    What only looks at memory in another way passes: its results share storage with an input. (A dispatch mode would see
    the same at a lower level, but loads PyTorch's compiler, which takes longer than all captures together.)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        made = [x for x in _leaves(result) if isinstance(x, Tensor)]
        if made and ((name.endswith("_") and not name.endswith("__")) or name == "__setitem__"):
            raise NotCapturable(name)
        if name not in _SOURCES:
            known = {_storage(x) for x in _leaves(args) if isinstance(x, Tensor)}
            if any(_storage(x) not in known for x in made):
                raise NotCapturable(name)
        return result


# Functions of the arena itself: memory, not values.
_SOURCES = frozenset({"from_numpy"})


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _storage(tensor: Tensor) -> int:
    with DisableTorchFunction():
        return tensor.untyped_storage().data_ptr()


class TapeGraph(Graph):
    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def replay(self, host: HostArgs) -> None:
        self._tape.run()

    def profile(self) -> list[OpTime]:
        return self._tape.profile()

    def release(self) -> None:
        self._tape.keep.clear()


class TapeGraphs(GraphBackend):
    """Tapes of one worker. All of them share an arena: only one runs at a time."""

    traits = GraphTraits(host_args=False, max_graphs=None, shares_pool=True)

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._arena = Arena()
        self._told: set[str] = set()

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, key: GraphKey, body: Callable[[], None], host: HostArgs) -> Graph:
        tape = Tape(self._kernels)
        try:
            with self._recording(tape), _OnlyViews():
                body()
        except NotCapturable as reason:
            if str(reason) not in self._told:  # once, not for every number of requests
                self._told.add(str(reason))
                log.warning("steps are not captured: %s is not a native kernel", reason)
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
