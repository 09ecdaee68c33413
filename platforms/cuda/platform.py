"""CUDA as a platform: probed through the driver, described for devices that are not here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.platforms.cuda import flash_attention_rows, hardware
from headrace.platforms.device import DeviceInfo, DeviceRuntime
from headrace.platforms.platform import (
    Default,
    ModelShape,
    Platform,
    Problem,
    dtype_problems,
    mixed_tokens,
    step_tokens,
)
from headrace.platforms.queries import GroupQuery
from headrace.platforms.registry import Check, Implementation
from headrace.platforms.torch_device import rows as torch_rows
from headrace.platforms.triton import rows

# Architectures on which the contract tests were run by the project.
VERIFIED = frozenset({"sm_90"})
OLDEST = 75


class CudaPlatform(Platform):
    name = "cuda"
    priority = 100

    @classmethod
    def plausible(cls) -> str | None:
        return hardware.device_files()

    @classmethod
    def probe(cls) -> list[DeviceInfo]:
        found, driver = hardware.devices()
        built = hardware.torch_cuda()
        if found and not built:
            raise RuntimeError(
                "the installed torch has no CUDA; install the CUDA build of torch (pip install --force-reinstall "
                "torch on Linux, or the index that pytorch.org names)"
            )
        versions = {"driver CUDA": driver, "torch CUDA": built}
        names = ("torch", "triton", *flash_attention_rows.PACKAGES)
        versions |= {name: version for name in names if (version := hardware.version_of(name))}
        return [
            _info(index, device.name, device.arch, device.memory, device.units, versions=versions)
            for index, device in enumerate(found)
        ]

    @classmethod
    def describe(cls, arch: str) -> DeviceInfo:
        if arch not in hardware.DESCRIBED:
            known = ", ".join(hardware.DESCRIBED)
            raise ValueError(f"no CUDA arch named {arch!r}; known: {known}")
        name, memory, units = hardware.DESCRIBED[arch]
        return _info(0, name, arch, memory * hardware.GIB, units)

    @classmethod
    def known_archs(cls) -> Sequence[str]:
        return tuple(hardware.DESCRIBED)

    def worker_env(self, device: DeviceInfo, rank: int, world: int) -> Mapping[str, str]:
        # Which devices are visible, and in what order, is left as it was when they were probed: a device's index
        # then means the same in every process.
        return {
            "OMP_NUM_THREADS": "1",  # the host only plans; its threads would spin beside the engine
            "CUDA_MODULE_LOADING": "LAZY",
            # symmetric memory is used without it: see symmetric_memory.py
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        }

    def defaults(self, model: ModelShape, device: DeviceInfo) -> Mapping[str, Default]:
        dtype = device.dtypes[0]
        return {
            "model.dtype": Default(
                dtype,
                f"{device.arch} multiplies {dtype} on its matrix units"
                + ("" if dtype == "bfloat16" else "; it has no bfloat16"),
            ),
            "cache.block_size": Default(32, "fine enough to share prefixes, long enough to read"),
            "scheduler.max_num_batched_tokens": step_tokens(device),
            "scheduler.max_num_mixed_tokens": mixed_tokens(model),
            "scheduler.max_num_seqs": Default(256, "decoding is bound by memory up to about here"),
        }

    def check(self, config: Any, device: DeviceInfo) -> Sequence[Problem]:
        problems = dtype_problems(config, device)
        world = config.device.tensor_parallel_size
        if hardware.capability(device.arch) < OLDEST:
            text = f"{device.arch} is older than sm_{OLDEST}, the oldest that is served"
            problems.append(Problem("error", f"{text}; use --device cpu"))
        if device.versions and not hardware.version_of("triton"):  # else it is not here itself
            text = "triton is not installed here: without it every op runs unfused in PyTorch; pip install triton"
            problems.append(Problem("warning", text))
        if world > 1 and config.device.worker == "inproc":
            problems.append(Problem("error", "tensor parallelism needs --worker process"))
        return problems

    def implementations(self) -> Iterable[Implementation]:
        shared, libraries = rows.implementations(self.name, known), flash_attention_rows
        return [*shared, *libraries.implementations(self.name), *_collectives(self.name)]

    def open(self, device: DeviceInfo) -> DeviceRuntime:
        from headrace.platforms.cuda.runtime import CudaRuntime

        return CudaRuntime(device)


def _collectives(source: str) -> Iterable[Implementation]:
    def small_sums(query: GroupQuery, device: DeviceInfo, check: Check) -> Check:
        check.need(query.same_node, "its ranks read each other's memory: they have to share a host")
        check.need(query.world <= 8, f"{query.world} ranks exceed 8")
        check.need(hardware.capability(device.arch) >= 80, f"{device.arch} has no bfloat16 sums")
        return check.note("sums of up to 512 KiB; NCCL does the rest")

    target = "headrace.platforms.cuda.symmetric_memory:SymmetricMemoryCollectives"
    yield torch_rows.collectives(source, "symmetric_memory", target, small_sums, rank=60)
    yield torch_rows.collectives(source, "nccl", torch_rows.NCCL)


def known(check: Check, device: DeviceInfo) -> Check:
    """What is true of all kernels on this device."""
    check.need(hardware.capability(device.arch) >= OLDEST, f"{device.arch} is too old for Triton")
    if device.arch not in VERIFIED:
        check.doubt(f"the project has not run it on {device.arch}")
    return check


def _info(index: int, name: str, arch: str, memory: int, units: int, **rest: Any) -> DeviceInfo:
    """`rest`: versions and notes, of a device that is here."""
    can = hardware.features_of(arch), memory, units, hardware.dtypes_of(arch)
    return DeviceInfo("cuda", index, name, arch, *can, **rest)
