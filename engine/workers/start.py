"""Which executor a configuration asks for, and which device each rank gets. Torch-free."""

from __future__ import annotations

import dataclasses

from headrace.engine.config.settings import EngineConfig
from headrace.engine.core.executor import Executor
from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.source import ModelFiles
from headrace.engine.workers.executor import InprocExecutor, ProcessExecutor
from headrace.engine.workers.messages import Setup
from headrace.platforms.device import DeviceInfo
from headrace.platforms.probe import find, load_platform


def make_executor(
    config: EngineConfig, files: ModelFiles, spec: ModelSpec, device: DeviceInfo
) -> Executor:
    """An executor that has not started. ValueError when the settings cannot be had together."""
    settings = config.device
    world = settings.tensor_parallel_size
    kind = settings.worker
    if kind == "auto":
        kind = "process" if world > 1 else "inproc"
    if kind not in ("inproc", "process"):
        raise ValueError(f"--worker {kind} does not exist; there are auto, inproc and process")
    if kind == "inproc" and world > 1:
        raise ValueError(
            f"--worker inproc holds one rank, but --tensor-parallel-size {world} needs as many processes; "
            "leave --worker out"
        )
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
        for rank, place in enumerate(_places(device, world))
    ]
    depth = 2 if config.scheduler.overlap else 1
    if kind == "inproc":
        return InprocExecutor(setups, depth)
    platform = load_platform(device.platform)
    environments = [
        platform.worker_env(_with_threads(setup.device, settings.threads, world), rank, world)
        for rank, setup in enumerate(setups)
    ]
    return ProcessExecutor(setups, depth, environments)


def _places(device: DeviceInfo, world: int) -> list[DeviceInfo]:
    """Each rank's device: the chosen one and those that follow it. The only one there is, is shared."""
    if world == 1:
        return [device]
    found = sorted(find(device.platform).devices, key=lambda other: other.index)
    devices = [device] + [other for other in found if other.index > device.index]
    if len(devices) == 1 and len(found) <= 1:
        return devices * world
    if len(devices) < world:
        raise ValueError(
            f"--tensor-parallel-size {world} needs {world} devices from {device.spec} on, there are {len(devices)}"
        )
    return devices[:world]


def _with_threads(device: DeviceInfo, threads: int, world: int) -> DeviceInfo:
    """The device as it would be if each of `world` ranks had `threads` of its units."""
    return dataclasses.replace(device, units=threads * world) if threads else device
