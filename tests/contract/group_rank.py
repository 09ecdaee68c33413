"""One rank of some groups, in a process of its own: `python -m tests.contract.group_rank RANK WORLD FOLDER SCENE...`.

Standard output is what became of each group, as JSON. A scene is names of rows, the best first. Faults are rows of a
made-up platform: a library that gives wrong sums on one rank, mixes up its buffers, cannot be had, hangs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from headrace.platforms import groups
from headrace.platforms.collectives import OP, GroupSpec
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.graph import GraphBackend, GraphTraits
from headrace.platforms.reference.checks.collectives import check_group
from headrace.platforms.reference.collectives import HostCollectives
from headrace.platforms.registry import (
    Check,
    Implementation,
    Policy,
    Registry,
    SelectionError,
    SelectionReport,
)
from headrace.platforms.torch_device.collectives import TorchCollectives


class ByTorch(TorchCollectives):
    """What GPUs have, over the one library that is here."""

    backend = "gloo"
    capture_safe = False


class OffByOne(HostCollectives):
    """The last element, where a copy in words leaves a rest, on one rank alone."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = super().all_reduce(x)
        if self.rank == 1 and total.numel() > 256 and total.numel() % 2:
            total.view(-1)[-1] += 1
        return total


class Unsummed(HostCollectives):
    """Every rank keeps its own part."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Stale(HostCollectives):
    """The third of several sums in a row reads a buffer of the first."""

    def __init__(self, group: GroupSpec, runtime: Any) -> None:
        super().__init__(group, runtime)
        self._seen: list[torch.Tensor] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._seen.append(super().all_reduce(x.clone()))
        late = self._seen[-3] if len(self._seen) % 3 == 0 else self._seen[-1]
        return late if late.shape == x.shape and late.dtype == x.dtype else self._seen[-1]


class Swapped(HostCollectives):
    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        parts = super().all_gather(x, dim).chunk(self.world, dim)
        return torch.cat(parts[::-1], dim)


class FromZero(HostCollectives):
    """Broadcasts come from rank 0, whatever was asked."""

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        return super().broadcast(x, 0)


class Absent(HostCollectives):
    def __init__(self, group: GroupSpec, runtime: Any) -> None:
        if group.rank == 1:
            raise RuntimeError("no such device\nand a trace")
        super().__init__(group, runtime)


class Hangs(HostCollectives):
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(60)
        return x


class Capturing(HostCollectives):
    """Says that a graph may hold it."""

    capture_safe = True


class Forgetful(GraphBackend):
    """Graphs that replay nothing: what becomes of a call that a capture does not see."""

    traits = GraphTraits(host_args=False, max_graphs=None, shares_pool=False)

    def session(self) -> Any:
        return contextlib.nullcontext()

    def capture(self, key: Any, body: Any, host: Any) -> Any:
        return SimpleNamespace(replay=lambda host: None, release=lambda: None)


def _doubted(query: Any, device: Any) -> Any:
    return Check().doubt("made up").verdict()


def _first_rank_only(query: Any, device: Any) -> Any:
    return Check().need(device.index == 0, "an older device").verdict()


def rows(scene: str) -> list[Implementation]:
    made = {
        "torch": ("ByTorch", _doubted),
        "off": ("OffByOne", _doubted),
        "unsummed": ("Unsummed", _doubted),
        "stale": ("Stale", _doubted),
        "swapped": ("Swapped", _doubted),
        "from_zero": ("FromZero", _doubted),
        "absent": ("Absent", _doubted),
        "hangs": ("Hangs", _doubted),
        "capturing": ("Capturing", _doubted),
        "uneven": ("ByTorch", _first_rank_only),
    }
    found = []
    for rank, name in enumerate(reversed(scene.split(","))):
        if name in made:
            target, supports = made[name]
            row = Implementation(
                OP, name, f"tests.contract.group_rank:{target}", rank=rank + 1, supports=supports
            )
            found.append(row)
    return found


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def opened(scene: str, runtime: Any, spec: GroupSpec) -> dict[str, Any]:
    registry, policy = Registry.with_reference(rows(scene)), Policy()
    if "alone" in scene:
        policy = Policy(disable=frozenset({f"{OP}=reference"}))
    report = SelectionReport()
    try:
        with groups.open_group(spec, runtime, registry, policy, report) as group:
            check_group(group, runtime, spec.rank, spec.world)
            (decision,) = report.decisions
            table = {row.name: [row.status, *row.reasons] for row in decision.candidates}
            return {"chosen": decision.chosen, "table": table, "capture": group.capture_safe}
    except SelectionError as error:
        return {"error": str(error)}


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    platform = CpuPlatform()
    runtime = platform.open(platform.probe()[0])
    runtime.info = dataclasses.replace(runtime.info, index=rank)
    said = {}
    for number, scene in enumerate(sys.argv[4:]):
        if "hangs" in scene:
            groups.PATIENCE = 3.0
        lines = Lines()
        groups.log.addHandler(lines)
        graphs = runtime.graphs
        if "capturing" in scene:
            runtime.graphs = Forgetful  # type: ignore[method-assign,assignment]
        said[scene] = opened(scene, runtime, GroupSpec(rank, world, f"file://{folder}/{number}"))
        said[scene]["log"] = lines.lines
        groups.log.removeHandler(lines)
        runtime.graphs = graphs  # type: ignore[method-assign]
    runtime.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
