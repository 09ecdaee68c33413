"""Kernels of a profiled step: whose they are and how long they took, from the events that the worker recorded.

Two things are in such a trace. First every op of a step, run by itself under a mark of its own ("headrace op N"): so it
is known which kernels each op launches. Then some steps as the engine runs them ("headrace step N"), most of whose
kernels belong to one launch of a graph: the n-th kernel of a name there is that of the op that launched the n-th of
that name before. What is left belongs to the part of the step that launched it (inputs, sampling).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]

MARK = "headrace "
_LAUNCHES = ("_runtime", "_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
PARTS = ("inputs", "launch", "sampling")


@dataclass(frozen=True, slots=True)
class Launched:
    """A kernel with the marks that were open where the host launched it."""

    name: str
    began: float  # microseconds
    ended: float
    op: int  # -1: none
    step: int  # -1: none
    part: str


@dataclass(slots=True)
class Kernels:
    """Of one step, on average. `ops`: op -> kernel -> seconds; `parts` the same for what is no op's."""

    ops: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    parts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    busy: float = 0.0  # seconds in which a kernel ran
    period: float = 0.0  # from one step's first kernel to the next one's, under the profiler


def read(events: Sequence[Event]) -> Kernels:
    """Raises ValueError where no kernel of a step was recorded: a sentence."""
    launched = sorted(_launched(events), key=lambda one: one.began)
    owners: dict[str, list[int]] = defaultdict(list)
    for one in launched:
        if one.op >= 0:
            owners[one.name].append(one.op)
    steps: dict[int, list[Launched]] = defaultdict(list)
    for one in launched:
        if one.step >= 0:
            steps[one.step].append(one)
    if not steps:
        raise ValueError("the profiler recorded no kernel of a step")
    found, count = Kernels(), len(steps)
    for kernels in steps.values():
        seen: Counter[str] = Counter()
        for one in kernels:
            number = seen[one.name]
            seen[one.name] += 1
            took = 1e-6 * (one.ended - one.began) / count
            if number < len(owners[one.name]):
                found.ops[owners[one.name][number]][one.name] += took  # type: ignore[assignment]
            else:
                found.parts[one.part or "launch"][one.name] += took  # type: ignore[assignment]
    inside = [one for kernels in steps.values() for one in kernels]
    found.busy = 1e-6 * _covered(inside) / count
    starts = sorted(kernels[0].began for kernels in steps.values())
    found.period = 1e-6 * (starts[-1] - starts[0]) / (count - 1) if count > 1 else found.busy
    return found


def _launched(events: Sequence[Event]) -> Iterator[Launched]:
    marks = [event for event in events if event["cat"] == "user_annotation"]
    threads = {event["tid"] for event in marks}
    launches = [e for e in events if e["cat"].endswith(_LAUNCHES) and _correlation(e)]
    # profilers number threads in ways of their own: then the only thread that launches is the one that marks
    launches = [e for e in launches if e["tid"] in threads] or launches
    where = {}
    open_marks: list[Event] = []
    # a mark before a launch of the same microsecond, the outer one before the inner one
    order = sorted(
        [*marks, *launches], key=lambda e: (e["ts"], e["cat"] != "user_annotation", -e["dur"])
    )
    for event in order:
        while open_marks and open_marks[-1]["ts"] + open_marks[-1]["dur"] < event["ts"]:
            open_marks.pop()
        if event["cat"] == "user_annotation":
            open_marks.append(event)
        else:
            names = [mark["name"].removeprefix(MARK) for mark in open_marks]
            where[_correlation(event)] = names
    for event in events:
        if event["cat"] in _DEVICE and _correlation(event) in where:
            names = where[_correlation(event)]
            yield Launched(
                event["name"],
                event["ts"],
                event["ts"] + event["dur"],
                _number(names, "op "),
                _number(names, "step "),
                next((name for name in reversed(names) if name in PARTS), ""),
            )


def _correlation(event: Event) -> int:
    return int(event.get("args", {}).get("correlation", 0))


def _number(names: Iterable[str], kind: str) -> int:
    return next((int(name.removeprefix(kind)) for name in names if name.startswith(kind)), -1)


def _covered(kernels: Iterable[Launched]) -> float:
    """Microseconds in which at least one ran."""
    total, until = 0.0, float("-inf")
    for one in sorted(kernels, key=lambda one: one.began):
        total += max(0.0, one.ended - max(one.began, until))
        until = max(until, one.ended)
    return total


def chrome(step: Mapping[str, Any]) -> dict[str, Any]:
    """A trace that viewers such as Perfetto open: what the profiler recorded, or else the host's parts of the steps and
    below them the ops of one step, each as long as it took by itself."""
    if step["trace"]:
        return {"traceEvents": list(step["trace"]), "displayTimeUnit": "ms"}
    events = [_named("process_name", 0, 0, "headrace"), _named("thread_name", 0, 1, "steps")]
    events.append(_named("thread_name", 0, 2, "ops of one step, one by one"))
    spans = step["spans"]
    zero = min((began for _, began, _, _ in spans), default=0.0)
    for name, began, ended, _ in spans:
        events.append(_event(name, "step", 1, began - zero, ended - began, {}))
    at = 0.0
    for op, detail, nbytes, operations, seconds in step["ops"]:
        args = {"sizes": detail, "bytes": nbytes, "operations": operations}
        events.append(_event(op, "op", 2, at, seconds, args))
        at += seconds
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(
    name: str, kind: str, thread: int, began: float, seconds: float, args: Any
) -> dict[str, Any]:
    times = {"ts": round(1e6 * began, 3), "dur": round(1e6 * seconds, 3)}
    return {"ph": "X", "name": name, "cat": kind, "pid": 0, "tid": thread, "args": args, **times}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
