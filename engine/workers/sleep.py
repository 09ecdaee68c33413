"""A worker's part in sleep: its weights and KV cache are given back to the device, and taken again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.engine.runner.kv import KV_TAG
from headrace.engine.runner.runner import Runner
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.kv_layout import KVPlan

WEIGHTS_TAG = "weights"


class Sleeper:
    """Every call may be made again after one that failed. Graphs stay valid where the device keeps the addresses;
    elsewhere the cache is made anew and `wake` captures them again.
    """

    def __init__(
        self, runtime: DeviceRuntime, runner: Runner, plan: KVPlan, reload: Callable[[], None]
    ) -> None:
        self._runtime = runtime
        self._runner = runner
        self._plan = plan
        self._reload = reload  # reads the weights from the files into their places
        self._asleep: set[str] = set()
        self._dropped = False  # the weights: nowhere but in the files

    def sleep(self, level: int) -> dict[str, Any]:
        """1: weights to the host's memory; 2: weights dropped. The KV cache is dropped either way.

        Bytes that the device of this rank got back, for each tag, and notes on what could not be done. MemoryError
        when the host has no room for the weights: everything is as before then.
        """
        allocator, notes = self._runtime.allocator(), []
        self._runtime.synchronize()
        freed = {WEIGHTS_TAG: 0, KV_TAG: 0}
        reason = allocator.stays_awake(WEIGHTS_TAG)
        if reason:
            notes.append(f"the weights stay where they are, because {reason}")
        elif WEIGHTS_TAG not in self._asleep:
            freed[WEIGHTS_TAG] = allocator.sleep(WEIGHTS_TAG, keep=level == 1)
            self._asleep.add(WEIGHTS_TAG)
            self._dropped = level == 2
        if KV_TAG not in self._asleep:
            reason = allocator.stays_awake(KV_TAG)
            if reason:
                freed[KV_TAG] = self._give_up_kv()
                notes.append(
                    f"wake_up makes the KV cache anew and captures graphs again, because {reason}"
                )
            else:
                freed[KV_TAG] = allocator.sleep(KV_TAG, keep=False)
            self._asleep.add(KV_TAG)
        return {"freed_bytes": freed, "notes": notes}

    def wake(self, tags: list[str], warm_up: Callable[[], None]) -> None:
        """Take the memory of these tags again, those that do not sleep left out. torch.OutOfMemoryError."""
        allocator = self._runtime.allocator()
        if WEIGHTS_TAG in tags and WEIGHTS_TAG in self._asleep:
            if self._dropped:
                self._reload()
            else:
                allocator.wake(WEIGHTS_TAG)
            self._asleep.remove(WEIGHTS_TAG)
        if KV_TAG in tags and KV_TAG in self._asleep:
            if allocator.stays_awake(KV_TAG):
                allocator.free(KV_TAG)  # what a wake that failed may have reserved
                self._runner.init_kv(self._plan)
                warm_up()
            else:
                allocator.wake(KV_TAG)
            self._asleep.remove(KV_TAG)
        self._runtime.synchronize()

    def _give_up_kv(self) -> int:
        allocator = self._runtime.allocator()
        held = allocator.stats().get(KV_TAG, 0)
        self._runner.drop_kv(self._plan)
        allocator.free(KV_TAG)
        return held
