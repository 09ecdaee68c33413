"""Ascend NPUs as a platform: probed through npu-smi, described for devices that are not here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.platforms.device import DeviceInfo, DeviceRuntime
from headrace.platforms.npu import hardware, rows, versions
from headrace.platforms.platform import (
    Default,
    ModelShape,
    Platform,
    Problem,
    dtype_problems,
    step_tokens,
)
from headrace.platforms.registry import Implementation, Requirement
from headrace.platforms.torch_device import rows as torch_rows

BLOCK_SIZE = 128


class NpuPlatform(Platform):
    name = "npu"
    priority = 80
    safe_probe = True  # npu-smi is a process of its own; no library is loaded

    @classmethod
    def plausible(cls) -> str | None:
        return hardware.device_files()

    @classmethod
    def probe(cls) -> list[DeviceInfo]:
        table = hardware.smi("info")
        found = hardware.chips(table)
        driver = hardware.driver_of(table) or hardware.driver_version()
        here = {
            versions.TORCH: hardware.version_of("torch"),
            versions.TORCH_NPU: hardware.version_of("torch-npu"),
            versions.CANN: hardware.cann_version(),
            versions.DRIVER: driver,
        }
        if found and not here[versions.TORCH_NPU]:
            raise RuntimeError(versions.missing_torch_npu(here[versions.TORCH]))
        here = {name: version for name, version in here.items() if version}
        devices = []
        for index, place in enumerate(hardware.visible(len(found))):
            chip = found[place]
            soc = hardware.soc_of(chip)
            notes = () if chip.health == "OK" else (f"npu-smi calls its health {chip.health}",)
            devices.append(_info(index, soc, chip.memory, versions=here, notes=notes))
        return devices

    @classmethod
    def describe(cls, arch: str) -> DeviceInfo:
        if arch not in hardware.DESCRIBED:
            known = ", ".join(hardware.DESCRIBED)
            raise ValueError(f"no NPU arch named {arch!r}; known: {known}")
        name, soc, memory = hardware.DESCRIBED[arch]
        return _info(0, soc, memory * hardware.GIB, name=name)

    @classmethod
    def known_archs(cls) -> Sequence[str]:
        return tuple(hardware.DESCRIBED)

    def worker_env(self, device: DeviceInfo, rank: int, world: int) -> Mapping[str, str]:
        # Which devices are visible, and in what order (ASCEND_RT_VISIBLE_DEVICES), is left as it was when they were
        # probed: a device's index then means the same in every process.
        found = {
            "OMP_NUM_THREADS": "1",  # the host only plans; its threads would spin beside the engine
            "TASK_QUEUE_ENABLE": "1",  # launches are handed to a thread of torch_npu's own
            # blocks of memory grow in place, so that steps of unlike sizes leave no holes
            "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        }
        if world > 1 and "fused_attention" in device.features:
            # collectives run on the vector cores: one stream each instead of several, and streams bound the graphs
            found["HCCL_OP_EXPANSION_MODE"] = "AIV"
        return found

    def defaults(self, model: ModelShape, device: DeviceInfo) -> Mapping[str, Default]:
        dtype = device.dtypes[0]
        return {
            "model.dtype": Default(
                dtype,
                f"{device.arch} multiplies {dtype} on its matrix units"
                + ("" if dtype == "bfloat16" else "; it has no bfloat16"),
            ),
            "cache.block_size": Default(
                BLOCK_SIZE, "the fused attention reads blocks of this many tokens"
            ),
            "scheduler.max_num_batched_tokens": step_tokens(device, large=60),
            "scheduler.max_num_seqs": Default(
                128, "every graph size takes streams, of which a device has few"
            ),
        }

    def check(self, config: Any, device: DeviceInfo) -> Sequence[Problem]:
        problems = dtype_problems(config, device)
        world = config.device.tensor_parallel_size
        if device.arch not in hardware.DESCRIBED:
            known = ", ".join(hardware.DESCRIBED)
            text = f"{device.name} is none of the generations that are served ({known}); use --device cpu"
            problems.append(Problem("error", text))
        if (
            device.versions
        ):  # a described device has none: what is installed here says nothing about it
            problems += versions.problems(device.versions)
            if versions.CANN in device.versions and not hardware.environment_set():
                text = f"CANN's environment is not set ({hardware.HOME}): {versions.SOURCE}, then start again"
                problems.append(Problem("error", text))
        if world > 1 and config.device.worker == "inproc":
            problems.append(Problem("error", "tensor parallelism needs --worker process"))
        return problems

    def implementations(self) -> Iterable[Implementation]:
        hccl = "headrace.platforms.npu.collectives:HcclCollectives"
        needs = (Requirement("torch-npu", ">=2.9"),)
        group = torch_rows.collectives(self.name, "hccl", hccl, requires=needs)
        return [*rows.implementations(self.name), group]

    def open(self, device: DeviceInfo) -> DeviceRuntime:
        from headrace.platforms.npu.runtime import NpuRuntime

        return NpuRuntime(device)


def _info(
    index: int,
    soc: str,
    memory: int,
    *,
    name: str = "",
    versions: Mapping[str, str] | None = None,
    notes: tuple[str, ...] = (),
) -> DeviceInfo:
    arch = hardware.arch_of(soc)
    return DeviceInfo(
        platform="npu",
        index=index,
        name=name or soc,
        arch=arch or soc,
        features=hardware.features_of(arch),
        memory=memory,
        units=hardware.cores_of(soc),
        dtypes=hardware.dtypes_of(arch),
        versions=versions or {},
        notes=notes,
    )
