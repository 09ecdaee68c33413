"""One rank of the collectives' test, in a process of its own: `python -m headrace.cli.conformance.ranks`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import msgspec

from headrace.engine.config.env import child_environment
from headrace.platforms.collectives import OP, GroupSpec
from headrace.platforms.device import DeviceInfo
from headrace.platforms.groups import open_group
from headrace.platforms.probe import load_platform
from headrace.platforms.registry import Policy, Registry

RANK_SECONDS = 180.0


class Rank(msgspec.Struct):
    device: DeviceInfo
    rank: int
    world: int
    init_method: str
    name: str
    path: list[str]


def run_group(devices: Sequence[DeviceInfo], name: str) -> str:
    """A rank on each device, all at once, over the implementation of that name. "" when all of them saw what they
    should, else what the first one said."""
    world = len(devices)
    platform = load_platform(devices[0].platform)
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder, ExitStack() as logs:
        meeting = f"file://{folder}/rendezvous"
        ranks = []
        for number, device in enumerate(devices):
            log = logs.enter_context(Path(folder, f"rank{number}.log").open("w+"))
            process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(**platform.worker_env(device, number, world)),
            )
            job = Rank(device, number, world, meeting, name, list(sys.path))
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(job))
            process.stdin.close()
            ranks.append((process, log))
        said = [_end(number, *rank) for number, rank in enumerate(ranks)]
    return next((text for text in said if text), "")


def _end(number: int, process: subprocess.Popen[bytes], log: TextIO) -> str:
    try:
        code = process.wait(RANK_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"rank {number} had not ended after {RANK_SECONDS:g} s"
    log.seek(0)
    lines = log.read().strip().splitlines()
    return f"rank {number}: {lines[-1] if lines else f'exit {code}'}" if code else ""


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Rank)
    sys.path[:] = job.path
    from headrace.platforms.reference.checks.collectives import check_group

    platform = load_platform(job.device.platform)
    registry, runtime = (
        Registry.with_reference(platform.implementations()),
        platform.open(job.device),
    )
    spec = GroupSpec(job.rank, job.world, job.init_method)
    with open_group(spec, runtime, registry, Policy(force={OP: job.name})) as group:
        check_group(group, runtime, job.rank, job.world)
    runtime.close()


if __name__ == "__main__":
    main()
