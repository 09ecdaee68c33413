"""Executors: one engine-side driver over any number of links to workers. Torch-free."""

from __future__ import annotations

import os
import selectors
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from headrace.engine.core.executor import Progress, WorkerFailed, WorkerInfo
from headrace.engine.core.step import SCHEMA_VERSION, StepPlan, StepResult
from headrace.engine.workers.links import Link, LinkDown, ProcessLink, ThreadLink
from headrace.engine.workers.messages import Call, Failed, Hello, Reply, Setup
from headrace.engine.workers.messages import Progress as ProgressMessage
from headrace.platforms.kv_layout import KVPlan

T = TypeVar("T")

# Seconds without any news after which a phase, or a step, counts as hung.
STALL_S: Mapping[str, float] = {
    "open": 180.0,
    "load": 900.0,
    "measure": 600.0,
    "init_kv": 300.0,
    "warm_up": 900.0,
}
CALL_STALL_S = 120.0
# Calls that move or read all weights.
LONG_CALL_S: Mapping[str, float] = {"sleep": 900.0, "wake": 900.0}
STEP_STALL_S = 900.0


class CallFailed(RuntimeError):
    """A utility call could not be carried out; workers and steps are unharmed."""


class _LinkedExecutor:
    """Executor (engine/core/executor.py) over links. Rank 0 answers steps; every rank answers calls.

    Any rank's death or silence raises WorkerFailed, from then on at every call, and ends the other ranks.
    """

    def __init__(self, setups: Sequence[Setup], depth: int) -> None:
        self.depth = depth
        self._setups = setups
        self._links: list[Link] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._results: deque[StepResult] = deque()
        self._flight: deque[float] = deque()  # when each unanswered step was sent
        self._replies: dict[int, Reply] = {}  # by rank, to the call under way
        self._calls = 0
        self._progress: Progress | None = None
        self._heard = 0.0
        self._failure = ""

    def _connect(self, setup: Setup) -> Link:
        raise NotImplementedError

    def start(self, progress: Progress) -> WorkerInfo:
        for setup in self._setups:
            link = self._connect(setup)
            self._links.append(link)
            self._selector.register(link, selectors.EVENT_READ, link)
        for link in self._links:
            self._reach(link, link.begin)
        self._progress = progress
        for phase in ("open", "load"):
            self._call_all(phase)
        answers = self._call_all("measure")
        infos = [msgspec.convert(answer, WorkerInfo) for answer in answers]
        # Ranks on one device (a CPU, for one) see the same free memory: it is theirs together.
        places = [setup.device.spec for setup in self._setups]
        free = min(
            info.free_memory // places.count(place)
            for info, place in zip(infos, places, strict=True)
        )
        activation = max(info.activation_bytes for info in infos)
        return msgspec.structs.replace(infos[0], free_memory=free, activation_bytes=activation)

    def init_kv(self, plan: KVPlan, progress: Progress) -> None:
        self._progress = progress
        self._call_all("init_kv", msgspec.to_builtins(plan))
        self._call_all("warm_up")
        self._progress = None  # the start is over: what calls report later is for nobody

    def submit(self, plan: StepPlan) -> None:
        self._require_alive()
        self._flight.append(time.monotonic())
        self._send(plan)

    def poll(self, timeout: float) -> StepResult | None:
        self._require_alive()
        deadline = time.monotonic() + timeout
        while not self._results:
            left = deadline - time.monotonic()
            if not self._wait(max(left, 0.0)) and left <= 0:
                self._check_stall()
                return None
        return self._results.popleft()

    def fileno(self) -> int:
        return self._selector.fileno()  # epoll's or kqueue's own

    def call(self, method: str, *args: Any) -> Any:
        """A utility of worker.Worker: selection, reset, profile, sleep. CallFailed when it cannot be done."""
        answer = self._call_all(method, *args)[0]
        if self._results:  # they came meanwhile: whoever waits on fileno must hear of them
            os.write(self._wake_write, b"\0")
        return answer

    def close(self) -> None:
        self._end(orderly=not self._failure)
        self._selector.close()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)

    # Messages

    def _send(self, message: StepPlan | Call) -> None:
        for link in self._links:
            self._reach(link, link.send, message)

    def _reach(self, link: Link, action: Callable[..., T], *args: Any) -> T:
        try:
            return action(*args)
        except LinkDown as error:
            self._fail(f"worker {link.rank} died: {error}")

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        """Every rank's answer, in rank order. A phase that fails on one rank fails at once: others may wait for it."""
        self._require_alive()
        self._calls += 1
        self._replies.clear()
        self._heard = time.monotonic()
        self._send(Call(self._calls, method, list(args)))
        limit = STALL_S.get(method) or LONG_CALL_S.get(method, CALL_STALL_S)
        errors: list[tuple[int, str]] = []
        while len(self._replies) < len(self._links):
            left = self._heard + limit - time.monotonic()
            if left <= 0:
                silent = [str(link.rank) for link in self._links if link.rank not in self._replies]
                self._fail(
                    f"worker {', '.join(silent)} said nothing for {limit:.0f} s in {method!r}"
                )
            self._wait(left)
            errors = [(rank, reply.error) for rank, reply in self._replies.items() if reply.error]
            if errors and method in STALL_S:
                self._fail(self._named(*errors[0]))
        if errors:
            raise CallFailed(self._named(*errors[0]))
        return [self._replies[link.rank].value for link in self._links]

    def _wait(self, timeout: float) -> bool:
        """Take one message of every link that has one; False when none had before the time was up."""
        ready = self._selector.select(timeout)
        for key, _ in ready:
            if key.data is None:
                os.read(self._wake_read, 1)
            else:
                self._take(key.data)
        return bool(ready)

    def _take(self, link: Link) -> None:
        message = self._reach(link, link.receive)
        self._heard = time.monotonic()
        if isinstance(message, StepResult):
            self._flight.popleft()
            self._results.append(message)
        elif isinstance(message, ProgressMessage):
            if link.rank == 0 and self._progress is not None:
                self._progress(message.phase, message.done, message.total, message.text)
        elif isinstance(message, Reply):
            self._replies[link.rank] = message
        elif isinstance(message, Failed):
            self._fail(f"worker {link.rank}: {message.error}")
        elif isinstance(message, Hello) and message.schema != SCHEMA_VERSION:
            self._fail(
                f"worker {link.rank} speaks step schema {message.schema}, the engine {SCHEMA_VERSION}; "
                "they come from different installations of headrace"
            )

    def _named(self, rank: int, text: str) -> str:
        return f"worker {rank}: {text}" if len(self._setups) > 1 else text

    # Failure

    def _require_alive(self) -> None:
        if self._failure:
            raise WorkerFailed(self._failure)

    def _check_stall(self) -> None:
        if self._flight and time.monotonic() - max(self._flight[0], self._heard) > STEP_STALL_S:
            self._fail(f"no worker answered a step for {STEP_STALL_S:.0f} s")

    def _fail(self, text: str) -> NoReturn:
        self._failure = text
        self._end(orderly=False)
        raise WorkerFailed(text)

    def _end(self, orderly: bool) -> None:
        links, self._links = self._links, []
        for link in links:
            self._selector.unregister(link)
        for link in links:
            link.close(orderly)


class InprocExecutor(_LinkedExecutor):
    """One worker in a thread of this process."""

    def _connect(self, setup: Setup) -> Link:
        return ThreadLink(setup)


class ProcessExecutor(_LinkedExecutor):
    """A process for each rank, started with what its platform wants in the environment."""

    def __init__(
        self, setups: Sequence[Setup], depth: int, environments: Sequence[Mapping[str, str]]
    ) -> None:
        super().__init__(setups, depth)
        self._environments = environments
        # The ranks meet through a file of their own: no port to guess, none for others to connect to.
        self._folder = tempfile.mkdtemp(prefix="headrace-")
        for setup in setups:
            setup.init_method = setup.init_method or f"file://{self._folder}/rendezvous"

    def _connect(self, setup: Setup) -> Link:
        return ProcessLink(setup, self._environments[setup.rank])

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)
