"""Which executor a configuration asks for, and which device each rank gets. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from headrace.engine.config.settings import EngineConfig
from headrace.engine.core.executor import Executor
from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.source import ModelFiles
from headrace.engine.workers.executor import InprocExecutor, ProcessExecutor
from headrace.engine.workers.messages import Setup
from headrace.engine.workers.platform import platform_named
from headrace.platforms.device import DeviceInfo


def make_executor(
    config: EngineConfig,
    files: ModelFiles,
    spec: ModelSpec,
    device: DeviceInfo,
    more_devices: Sequence[DeviceInfo] = (),
) -> Executor:
    """An executor that has not started. ValueError when the settings exclude each other.

    `device` is rank 0's. The other ranks take `more_devices` in turn; without any they share the first, which makes
    sense where a device is many cores.
    """
    settings = config.device
    world = settings.tensor_parallel_size
    devices = [device, *more_devices][:world]
    devices += [devices[-1]] * (world - len(devices))
    kind = settings.worker
    if kind == "auto":
        kind = "process" if world > 1 else "inproc"
    if kind not in ("inproc", "process"):
        raise ValueError(f"--worker {kind}: there are auto, inproc and process")
    if kind == "inproc" and world > 1:
        raise ValueError(
            f"--worker inproc holds one rank, --tensor-parallel-size {world} needs processes; "
            "leave --worker out"
        )
    depth = 2 if config.scheduler.overlap else 1
    setups = [
        Setup(
            config=config,
            files=files,
            spec=spec,
            device=place,
            rank=rank,
            world=world,
            init_method=settings.distributed_init,
        )
        for rank, place in enumerate(devices)
    ]
    if kind == "inproc":
        return InprocExecutor(setups, depth)
    platform = platform_named(device.platform)
    environments = [
        platform.worker_env(_with_threads(place, settings.threads, world), rank, world)
        for rank, place in enumerate(devices)
    ]
    return ProcessExecutor(setups, depth, environments)


def _with_threads(device: DeviceInfo, threads: int, world: int) -> DeviceInfo:
    """The device as it would be if each of `world` ranks had `threads` of its units."""
    return dataclasses.replace(device, units=threads * world) if threads else device
