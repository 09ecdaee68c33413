"""Sleep: the engine lends its memory to others. Who may do what meanwhile."""

from __future__ import annotations

from typing import Any

from headrace.engine.core.executor import Executor, WorkerFailed
from headrace.engine.ipc.messages import SLEEP_TAGS, Call
from headrace.engine.scheduler.scheduler import Scheduler

ASLEEP = "the server sleeps; POST /wake_up wakes it"
ENDED = "the server was put to sleep, which ended this request"

# Calls of the workers that touch neither weights nor cache.
_HARMLESS = ("selection",)


class Sleep:
    """`closed`: no request is taken any more, from the moment someone asks for sleep until all is awake again.

    Calls are made with no request unfinished and no step in flight.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._asleep: set[str] = set()
        self._level = 0
        self.closed = False

    def call(self, call: Call) -> Any:
        """The answer to a call of the workers. An exception that is no WorkerFailed concerns the caller alone."""
        if call.method == "sleep":
            return self._fall_asleep(int(call.args.get("level", 1)))
        if call.method == "wake":
            return self._wake([str(tag) for tag in call.args.get("tags") or SLEEP_TAGS])
        if self._asleep and call.method not in _HARMLESS:
            raise RuntimeError(ASLEEP)
        return self._executor.call(call.method, *call.args.values())

    def _fall_asleep(self, level: int) -> dict[str, Any]:
        if self._asleep == set(SLEEP_TAGS):
            note = f"it sleeps at level {self._level} already; wake it first to change that"
            return {
                "level": self._level,
                "freed_bytes": dict.fromkeys(SLEEP_TAGS, 0),
                "notes": [note],
            }
        self._scheduler.kv.forget_all()
        try:
            answer = self._executor.call("sleep", level)
        except WorkerFailed:
            raise
        except Exception:
            # One rank could not, and others may sleep: all or none.
            self._asleep = set(SLEEP_TAGS)
            self._wake(list(SLEEP_TAGS))
            raise
        self._asleep, self._level = set(SLEEP_TAGS), level
        return {"level": level, **answer}

    def _wake(self, tags: list[str]) -> dict[str, Any]:
        """Ranks that are awake do nothing, so that one that failed can be woken by another call."""
        # the weights first: reading them takes the most memory
        wanted = [tag for tag in SLEEP_TAGS if tag in tags]
        notes = [] if self._asleep else ["it was awake"]
        if self._asleep:
            self._executor.call("wake", wanted)
        self._asleep -= set(wanted)
        if not self._asleep:
            self.closed, self._level = False, 0
        return {"asleep": sorted(self._asleep), "notes": notes}
