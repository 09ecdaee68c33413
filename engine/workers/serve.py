"""A worker's loop: commands in order, answers in order, asleep when there is nothing to do."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from headrace.engine.core.step import StepPlan, StepResult
from headrace.engine.weights.source import ModelError
from headrace.engine.workers.messages import Call, Close, Failed, FromWorker, Progress, Reply, Setup
from headrace.engine.workers.worker import PHASES, UTILITIES, Worker
from headrace.platforms.probe import PlatformError
from headrace.platforms.registry import SelectionError

log = logging.getLogger(__name__)

Command = StepPlan | Call | Close
Send = Callable[[StepResult | FromWorker], None]

# Failures of a call whose text is a sentence for people. Anything else is a defect and gets its traceback logged.
_EXPECTED = (ModelError, PlatformError, SelectionError, OSError)
_OUT_OF_MEMORY = (
    "out of memory",
    "not enough memory",
    "cannot allocate memory",
    "status_alloc_failed",  # cuBLAS, hipBLAS
)


# How often a running step is asked whether it is ready, while no command comes.
_POLL_SECONDS = 1e-4


class _RankLost(Exception):
    """One rank of several failed in a step: the others wait for it inside a collective, for ever."""


@dataclass(slots=True)
class _InFlight:
    plan: StepPlan
    ready: Callable[[], bool]
    result: Callable[[], StepResult]


class WorkerLoop:
    """Runs until Close. A step that fails is answered with an error and harms no other, with one rank at least."""

    def __init__(self, setup: Setup, commands: SimpleQueue[Command], send: Send) -> None:
        self._setup = setup
        self._commands = commands
        self._send = send
        self._worker = Worker(setup, lambda *report: send(Progress(*report)))
        self._flight: deque[_InFlight] = deque()

    def run(self) -> None:
        try:
            while self._turn():
                pass
        except _RankLost as error:
            self._send(Failed(str(error)))
        finally:
            self._worker.close()

    def _turn(self) -> bool:
        command = self._next()
        if command is None:
            self._finish()
            return True
        if isinstance(command, StepPlan):
            self._start(command)
            return True
        while self._flight:
            self._finish()
        if isinstance(command, Call):
            self._send(self._call(command))
        return not isinstance(command, Close)

    def _next(self) -> Command | None:
        """The next command; None once the oldest step is ready, which comes first.

        Never a wait for a step alone: the device would be idle while a step that came meanwhile is started.
        """
        while self._flight:
            if self._flight[0].ready():
                return None
            with contextlib.suppress(Empty):
                return self._commands.get(timeout=_POLL_SECONDS)
        return self._commands.get()

    def _start(self, plan: StepPlan) -> None:
        try:
            pending = self._worker.launch(plan)
        except Exception as error:
            failed = self._failed(plan, error)
            self._flight.append(_InFlight(plan, lambda: True, lambda: failed))
        else:
            self._flight.append(_InFlight(plan, pending.ready, pending.result))

    def _finish(self) -> None:
        step = self._flight.popleft()
        try:
            answer = step.result()
        except Exception as error:
            answer = self._failed(step.plan, error)
        if self._setup.rank == 0:
            self._send(answer)

    def _failed(self, plan: StepPlan, error: Exception) -> StepResult:
        # As text: a record that somebody keeps would keep the frames of the step too, and in them its tensors, without
        # whose memory the next, smaller step may not pass either.
        log.error("step %d failed\n%s", plan.step_id, "".join(traceback.format_exception(error)))
        traceback.clear_frames(error.__traceback__)
        memory = is_out_of_memory(error)
        text = f"the device ran out of memory: {sentence(error)}" if memory else sentence(error)
        if self._setup.world > 1:
            raise _RankLost(f"a step failed ({text})") from error
        nothing = np.full(len(plan.rows), -1, np.int32)
        return StepResult(plan.step_id, nothing, {}, {}, [], error=text, retry=memory)

    def _call(self, call: Call) -> Reply:
        if call.method not in PHASES + UTILITIES:
            return Reply(call.call_id, error=f"workers have no call {call.method!r}")
        try:
            value: Any = getattr(self._worker, call.method)(*call.args)
        except Exception as error:
            expected = isinstance(error, _EXPECTED) or is_out_of_memory(error)
            level = logging.DEBUG if expected else logging.ERROR  # the answer says it
            log.log(level, "%s failed", call.method, exc_info=error)
            return Reply(call.call_id, error=sentence(error))
        return Reply(call.call_id, value)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller step might have passed, on any device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error).lower() for words in _OUT_OF_MEMORY
    )


def sentence(error: BaseException) -> str:
    """The error's first line; the kind is named where the text alone might not say what happened."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    if isinstance(error, (ValueError, OSError, PlatformError, SelectionError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
