"""ROCm as a platform: probed through the kernel's topology, described for devices that are not here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
from headrace.platforms.registry import Check, Implementation
from headrace.platforms.rocm import hardware
from headrace.platforms.rocm.aiter import rows as aiter_rows
from headrace.platforms.torch_device import rows as torch_rows
from headrace.platforms.triton import rows

# Architectures on which the contract tests were run by the project: none so far.
VERIFIED: frozenset[str] = frozenset()
NOT_SERVED = "none of the generations that are served (CDNA 1 to 4, RDNA 2 to 4)"


class RocmPlatform(Platform):
    name = "rocm"
    priority = 90
    safe_probe = True  # reads files of the kernel, loads nothing

    @classmethod
    def plausible(cls) -> str | None:
        return hardware.device_files()

    @classmethod
    def probe(cls) -> list[DeviceInfo]:
        found = hardware.devices()
        built = hardware.torch_hip()
        if found and not built:
            raise RuntimeError(
                "the installed torch has no HIP; install the ROCm build of torch from the index that pytorch.org names"
            )
        versions = {
            "ROCm": hardware.rocm_version(),
            "torch HIP": built,
            "torch": hardware.version_of("torch"),
            "triton": hardware.version_of(*hardware.TRITON_NAMES),
            hardware.AITER: hardware.version_of(hardware.AITER),
        }
        versions = {name: version for name, version in versions.items() if version}
        passes_for = hardware.override()
        devices = []
        for index, device in enumerate(found):
            notes: tuple[str, ...] = ()
            arch = passes_for or device.arch
            if arch != device.arch:
                notes = (f"HSA_OVERRIDE_GFX_VERSION makes this {device.arch} pass for {arch}",)
            shape = (index, device.name, arch, device.memory, device.units)
            devices.append(_info(*shape, versions=versions, notes=notes))
        served = [device for device in devices if hardware.family(device.arch)]
        if devices and not served:
            archs = ", ".join(dict.fromkeys(device.arch for device in devices))
            raise RuntimeError(f"{archs}: {NOT_SERVED}")
        # A processor's small integrated device is not the one that is meant when there is another.
        largest = max((device.memory for device in served), default=0)
        return sorted(served, key=lambda device: device.memory < largest // 2)

    @classmethod
    def describe(cls, arch: str) -> DeviceInfo:
        if arch not in hardware.DESCRIBED:
            known = ", ".join(hardware.DESCRIBED)
            raise ValueError(f"no ROCm arch named {arch!r}; known: {known}")
        name, memory, units = hardware.DESCRIBED[arch]
        return _info(0, name, arch, memory * hardware.GIB, units)

    @classmethod
    def known_archs(cls) -> Sequence[str]:
        return tuple(hardware.DESCRIBED)

    def worker_env(self, device: DeviceInfo, rank: int, world: int) -> Mapping[str, str]:
        # Which devices are visible, and in what order, is left as it was when they were probed: a device's index
        # then means the same in every process.
        found = {
            "OMP_NUM_THREADS": "1"
        }  # the host only plans; its threads would spin beside the engine
        if hardware.family(device.arch) in ("cdna3", "cdna4"):
            # arguments of kernels lie in the device's memory: some microseconds less for each launch
            found["HIP_FORCE_DEV_KERNARG"] = "1"
            if world > 1:
                # scratch memory that is given back and taken again stalls RCCL's kernels
                found["HSA_NO_SCRATCH_RECLAIM"] = "1"
        return found

    def defaults(self, model: ModelShape, device: DeviceInfo) -> Mapping[str, Default]:
        dtype = device.dtypes[0]
        matrix = "mfma" in device.features or "wmma" in device.features
        how = "on its matrix units" if matrix else "best: it has no matrix units"
        return {
            "model.dtype": Default(dtype, f"{device.arch} multiplies {dtype} {how}"),
            "cache.block_size": Default(32, "fine enough to share prefixes, long enough to read"),
            "scheduler.max_num_batched_tokens": step_tokens(device),
            "scheduler.max_num_mixed_tokens": mixed_tokens(model),
            "scheduler.max_num_seqs": Default(256, "decoding is bound by memory up to about here"),
        }

    def check(self, config: Any, device: DeviceInfo) -> Sequence[Problem]:
        problems = dtype_problems(config, device)
        world = config.device.tensor_parallel_size
        if not hardware.family(device.arch):
            problems.append(Problem("error", f"{device.arch}: {NOT_SERVED}; use --device cpu"))
        # a described device has no versions: what is installed here says nothing about it
        if device.versions and not hardware.version_of(*hardware.TRITON_NAMES):
            text = "triton is not installed here: without it every op runs unfused in PyTorch; install the one that "
            text += "the ROCm build of torch was released with"
            problems.append(Problem("warning", text))
        if world > 1 and config.device.worker == "inproc":
            problems.append(Problem("error", "tensor parallelism needs --worker process"))
        return problems

    def implementations(self) -> Iterable[Implementation]:
        shared = rows.implementations(self.name, known, hardware.TRITON_NAMES)
        rccl = torch_rows.collectives(self.name, "rccl", torch_rows.NCCL)
        custom = aiter_rows.collectives(self.name)
        return [*aiter_rows.implementations(self.name, known), *shared, custom, rccl]

    def open(self, device: DeviceInfo) -> DeviceRuntime:
        from headrace.platforms.rocm.runtime import RocmRuntime

        return RocmRuntime(device)


def known(check: Check, device: DeviceInfo) -> Check:
    """What is true of all kernels on this device."""
    check.need(bool(hardware.family(device.arch)), f"the kernels do not serve {device.arch}")
    if device.arch not in VERIFIED:
        check.doubt(f"the project has not run it on {device.arch}")
    return check


def _info(index: int, name: str, arch: str, memory: int, units: int, **rest: Any) -> DeviceInfo:
    """`rest`: versions and notes, of a device that is here."""
    can = hardware.features_of(arch), memory, units, hardware.dtypes_of(arch)
    return DeviceInfo("rocm", index, name, arch, *can, **rest)
