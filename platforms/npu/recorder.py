"""What a capture under way is told: the launches whose host integers change from replay to replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.platforms.batch import HostArgs

Launch = Callable[[HostArgs], None]


@dataclass(frozen=True, slots=True)
class Task:
    """A captured launch that a replay updates."""

    event: Any
    handle: Any
    launch: Launch


@dataclass(slots=True)
class Recorder:
    """The capture under way: ops hand it what they launch with host integers."""

    npu: Any  # torch.npu
    host: HostArgs
    tasks: list[Task] = field(default_factory=list)

    def launch(self, launch: Launch) -> None:
        """Capture `launch(host)` as a group of tasks. Every call of it must make the same tasks with the same tensors,
        which it should hold as `borrowed`."""
        npu = self.npu
        stream = npu.current_stream()
        event = npu.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        npu.graph_task_group_begin(stream)
        launch(self.host)
        self.tasks.append(Task(event, npu.graph_task_group_end(stream), launch))


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a hold on it: within a graph memory is used again by what comes later."""
    import torch_npu

    same: torch.Tensor = torch_npu._C._weak_ref_tensor(tensor)
    return same


@dataclass(slots=True)
class Captures:
    """`recorder` is that of the capture under way, None outside of captures."""

    recorder: Recorder | None = None
