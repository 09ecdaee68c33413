"""A step watched from outside: parts of the runner and bound ops are wrapped while a profile is taken, so that nothing
is paid for it at other times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

from headrace.engine.layers.base import walk
from headrace.engine.models.base import Model
from headrace.engine.weights.ggml_types import GGML_TYPES
from headrace.platforms.batch import BatchView
from headrace.platforms.ops import Ops
from headrace.platforms.profiling.costs import Cost, cost

if TYPE_CHECKING:
    from headrace.engine.runner.runner import PendingStep, Runner

MARK = "headrace "
LAUNCH = ("inputs", "launch", "sampling")  # parts of a step's launch


class Spans:
    """The host's times: (name, began, ended, processor time), in seconds; the first two are time.perf_counter()."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float, float]] = []
        self.built: tuple[Any, ...] = ()  # what the last step's inputs were built from

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        began, used = time.perf_counter(), time.thread_time()
        yield
        self.rows.append((name, began, time.perf_counter(), time.thread_time() - used))

    def result(self, pending: PendingStep) -> None:
        """Of a step: the wait for the device apart from what is done with its results."""
        with self.span("wait"):
            pending.done.synchronize()
        with self.span("results"):
            pending.result()

    def step(self) -> float:
        """Seconds from one step's end to the next one's; medians, as all here: others may disturb a few."""
        ends = [ended for name, _, ended, _ in self.rows if name == "results"]
        return median(b - a for a, b in pairwise(ends))

    def parts(self) -> dict[str, float]:
        """Processor time of this thread in a step by part, what its launch takes beside them as "other"; and the
        seconds that "wait" lasts."""
        count = sum(name == "results" for name, *_ in self.rows)
        used = {
            name: [row[3] for row in self.rows if row[0] == name]
            for name in (*LAUNCH, "step", "results")
        }
        found = {name: _median_sum(values, count) for name, values in used.items()}
        whole, inner = found.pop("step"), sum(found[name] for name in LAUNCH)
        waits = [ended - began for name, began, ended, _ in self.rows if name == "wait"]
        return {**found, "other": max(0.0, whole - inner), "wait": median(waits)}


def _median_sum(values: list[float], steps: int) -> float:
    """Of a step, in which so many values follow each other."""
    each = len(values) // steps
    return median(sum(values[i * each : (i + 1) * each]) for i in range(steps))


class _Proxy:
    """An object whose method is another one's, under the profiler's eyes."""

    def __init__(self, inner: Any, methods: dict[str, Any]) -> None:
        self._inner = inner
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def watched_steps(runner: Runner, spans: Spans) -> Iterator[None]:
    """What `runner.launch` does, by part."""

    def timed(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            if call.__name__ == "build":
                spans.built = args
            with spans.span(name), record_function(MARK + name):
                return call(*args, **named)

        return run

    owners: list[tuple[Any, str, str]] = [
        (runner.rows, "apply", "inputs"),
        (runner._builder, "build", "inputs"),
        (runner, "_forward", "launch"),
        (runner, "_sample", "sampling"),
    ]
    graphs = runner._graphs
    for owner, method, name in owners:
        setattr(owner, method, timed(getattr(owner, method), name))
    if graphs is not None:
        runner._graphs = _Proxy(graphs, {"run": timed(graphs.run, "launch")})  # type: ignore[assignment]
    try:
        yield
    finally:
        runner._graphs = graphs
        for owner, method, _ in owners:
            delattr(owner, method)  # the class's own is seen again


def on_host(runner: Runner) -> bool:
    """A device without streams: what it does is the host's own time."""
    return runner._stream is None


_BLOCKS = {kind.name: kind for kind in GGML_TYPES.values()}
_DTYPES = {"fp8_e4m3": "float8_e4m3fn"}


def stored(values: int, scheme: str) -> int:
    """Bytes of so many numbers in a dtype or a quantization."""
    if scheme in _BLOCKS:
        return _BLOCKS[scheme].row_bytes(values)
    return values * int(getattr(torch, _DTYPES.get(scheme, scheme)).itemsize)


OpRow = tuple[str, str, int, int, float]  # op, detail, bytes, operations, seconds


@dataclass(slots=True)
class Call:
    """One call of a bound op."""

    op: str
    cost: Cost = field(default_factory=Cost)
    seconds: float = 0.0

    def plain(self, seconds: float) -> OpRow:
        found = self.cost
        return self.op, found.detail, found.nbytes, found.operations, seconds


# What is called of instances; everything else is asked of them as it is.
_METHODS = ("attend", "write", "turn_and_write", "turn_and_attend", "gated", "normed")


class _Op:
    """A bound op that notes each call."""

    def __init__(self, op: str, query: Any, target: Any, log: _Log) -> None:
        self._named, self._target, self._log = (op, query), target, log

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._log.run(*self._named, "", partial(self._target, **named), args)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if name not in _METHODS:
            return value

        def call(*args: Any, **named: Any) -> Any:
            return self._log.run(*self._named, name, partial(value, **named), args)

        return call


class _Log:
    def __init__(self, view: BatchView, settle: Callable[[], None] | None) -> None:
        self._view, self._settle = view, settle
        self.calls: list[Call] = []

    def run(
        self, op: str, query: Any, method: str, call: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any:
        noted = Call(op)
        self.calls.append(noted)
        began = time.perf_counter()
        with record_function(f"{MARK}op {len(self.calls) - 1}"):
            result = call(*args)
        if self._settle is not None:
            self._settle()
        noted.seconds = time.perf_counter() - began
        # At once, though the device's data may have to be waited for: what a whole step's ops were given is more than
        # a device may hold.
        noted.cost = cost(query, method, args, self._view, stored)
        return result


@contextmanager
def watched_ops(
    model: Model, ops: Ops, view: BatchView, settle: Callable[[], None] | None
) -> Iterator[list[Call]]:
    """The calls of bound ops while it is open. `settle` waits for the device after each one."""
    log = _Log(view, settle)
    bound = {id(target): _Op(op, query, target, log) for (op, query), target in ops.bound.items()}

    def replaced(value: Any) -> Any:
        if id(value) in bound:
            return bound[id(value)]
        if type(value) in (list, tuple) and any(replaced(one) is not one for one in value):
            return type(value)(replaced(one) for one in value)
        return value

    kept = []
    for layer in walk(*vars(model).values()):
        for name, value in list(vars(layer).items()):
            new = replaced(value)
            if new is not value:
                kept.append((layer, name, value))
                setattr(layer, name, new)
    try:
        yield log.calls
    finally:
        for layer, name, value in kept:
            setattr(layer, name, value)
