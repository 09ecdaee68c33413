"""One idea of graphs for all devices: capture a body over static buffers, replay it with host integers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum

from headrace.platforms.batch import HostArgs


class GraphSupport(IntEnum):
    """How much an attention implementation lets be captured; the engine takes the minimum over all of them."""

    NEVER = 0
    DECODE_ONE = 1  # one query token for each request
    UNIFORM = 2  # the same number of query tokens for each request
    ALWAYS = 3


@dataclass(frozen=True, slots=True)
class GraphKey:
    phase: str  # "decode", "mixed"
    num_reqs: int
    num_tokens: int
    variant: str = ""


@dataclass(frozen=True, slots=True)
class GraphTraits:
    host_args: bool  # replay needs HostArgs
    max_graphs: int | None  # streams or memory limit the number of graphs
    shares_pool: bool
    graph_bytes: int = (
        0  # of device memory that a graph takes at most beside what its body allocates
    )


@dataclass(frozen=True, slots=True)
class OpTime:
    """One op of a captured step, run alone."""

    op: str
    detail: str  # sizes and storage, "576x1536 Q4_1"
    weight_bytes: int  # of weights that it reads
    seconds: float


class Graph(ABC):
    @abstractmethod
    def replay(self, host: HostArgs) -> None:
        """Enqueue only; never waits for the device."""

    @abstractmethod
    def release(self) -> None:
        """Must be called before the collectives that were captured are closed."""

    def profile(self) -> list[OpTime]:
        """Replay op by op and say what each one took; empty where ops cannot be told apart."""
        return []


class GraphBackend(ABC):
    traits: GraphTraits

    @abstractmethod
    def session(self) -> AbstractContextManager[None]:
        """Surrounds all captures of a start: stream, pool, no garbage collection."""

    @abstractmethod
    def capture(self, key: GraphKey, body: Callable[[], None], host: HostArgs) -> Graph:
        """Run `body` (no arguments, no result: it works on static buffers) and keep what it enqueued."""


class _EagerGraph(Graph):
    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body

    def replay(self, host: HostArgs) -> None:
        self._body()

    def release(self) -> None:
        return None


class EagerGraphs(GraphBackend):
    """Calls the body: for devices without graphs, and to debug those with."""

    traits = GraphTraits(host_args=False, max_graphs=None, shares_pool=False)

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, key: GraphKey, body: Callable[[], None], host: HostArgs) -> Graph:
        return _EagerGraph(body)
