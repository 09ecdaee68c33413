"""Who runs first: the one object that knows the order of requests, and the queue that keeps it."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator

from headrace.engine.core.request import Request

Rank = tuple[int, int]


class Policy(ABC):
    """A total order: the smallest rank is admitted first and preempted last."""

    @abstractmethod
    def rank(self, request: Request) -> Rank: ...

    @abstractmethod
    def displaces(self, waiting: Request, running: Request) -> bool:
        """Whether `running` gives its place up so that `waiting` can start."""


class FirstComeFirstServed(Policy):
    def rank(self, request: Request) -> Rank:
        return 0, request.number

    def displaces(self, waiting: Request, running: Request) -> bool:
        return False


class ByPriority(Policy):
    """Lower numbers first, equal ones in order of arrival. Only a strictly better number displaces, so two requests
    never displace each other in turns."""

    def rank(self, request: Request) -> Rank:
        return request.priority, request.number

    def displaces(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority


def make_policy(name: str) -> Policy:
    if name == "fcfs":
        return FirstComeFirstServed()
    if name == "priority":
        return ByPriority()
    raise ValueError(f"unknown scheduling policy {name!r}; known: fcfs, priority")


class WaitingQueue:
    """A heap by rank. A preempted request keeps its rank, so it comes back ahead of later arrivals."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Rank, Request]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._heap if not request.finished)

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (self._policy.rank(request), request))
        self._count += 1

    def head(self) -> Request | None:
        while self._heap and self._heap[0][1].finished:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        request = self.head()
        if request is None:
            raise IndexError("nobody waits")
        heapq.heappop(self._heap)
        self._count -= 1
        return request

    def discard(self, request: Request) -> None:
        """A waiting request has finished. Its entry is dropped later, but never do most entries belong to nobody."""
        request.finished = True
        self._count -= 1
        if len(self._heap) > 2 * self._count + 64:
            self._heap = [entry for entry in self._heap if not entry[1].finished]
            heapq.heapify(self._heap)
