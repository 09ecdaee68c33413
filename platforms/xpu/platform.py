"""XPU as a platform: found through Level Zero, described for GPUs that are not here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.platforms.device import DeviceInfo, DeviceRuntime
from headrace.platforms.platform import Default, ModelShape, Platform, Problem, dtype_problems
from headrace.platforms.registry import Implementation
from headrace.platforms.xpu import hardware, implementations
from headrace.platforms.xpu.hardware import FAMILIES, GIB

# What an integrated GPU may take of the memory that is free: the rest of the machine lives in it as well.
SHARED_MEMORY = 0.6
HOW_TORCH = "install the XPU build of torch from the index that pytorch.org names for Intel GPUs"


class XpuPlatform(Platform):
    name = "xpu"
    priority = 80

    @classmethod
    def plausible(cls) -> str | None:
        return hardware.device_files()

    @classmethod
    def probe(cls) -> list[DeviceInfo]:
        from headrace.platforms.xpu.level_zero import LevelZero

        found, driver = LevelZero().devices()
        if not found:
            mask = os.environ.get("ZE_AFFINITY_MASK")
            if mask is not None:
                raise RuntimeError(f"ZE_AFFINITY_MASK={mask!r} hides every Intel GPU; unset it")
            raise RuntimeError("Level Zero shows no Intel GPU; is its compute driver installed?")
        built = hardware.torch_xpu()
        if not built:
            raise RuntimeError(f"the installed torch has no XPU; {HOW_TORCH}")
        versions = {
            "driver": driver,
            "torch XPU": built,
            "torch": hardware.version_of("torch"),
            "triton": hardware.triton_version(),
            hardware.IPEX: hardware.version_of(hardware.IPEX),
        }
        versions = {name: version for name, version in versions.items() if version}
        notes = tuple(_notes(versions, os.environ))
        _, host = hardware.host_memory()
        devices = []
        for index, device in enumerate(found):
            memory = device.memory
            if device.integrated and host:
                memory = min(memory, host) if memory else host
            arch = hardware.family_of(device.device_id)
            shape = (index, device.name, arch, memory, device.units)
            devices.append(_info(*shape, versions=versions, notes=notes))
        return devices

    @classmethod
    def describe(cls, arch: str) -> DeviceInfo:
        if arch not in FAMILIES:
            raise ValueError(f"no XPU arch named {arch!r}; known: {', '.join(FAMILIES)}")
        family = FAMILIES[arch]
        return _info(0, family.title, arch, family.memory * GIB, family.units)

    @classmethod
    def known_archs(cls) -> Sequence[str]:
        return tuple(FAMILIES)

    def worker_env(self, device: DeviceInfo, rank: int, world: int) -> Mapping[str, str]:
        # ZE_AFFINITY_MASK and ZE_FLAT_DEVICE_HIERARCHY are left as they were when the devices were probed: a device's
        # index then means the same in every process.
        found = {
            "OMP_NUM_THREADS": "1",  # the host only plans; its threads would spin beside the engine
            "SYCL_CACHE_PERSISTENT": "1",  # kernels that the driver compiled are kept for the next start
        }
        if world > 1:
            # oneCCL: no MPI launcher is here to tell who is who, and all ranks are of this host
            found |= {
                "CCL_PROCESS_LAUNCHER": "none",
                "CCL_ATL_TRANSPORT": "ofi",
                "CCL_LOCAL_RANK": str(rank),
                "CCL_LOCAL_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world),
            }
        return found

    def defaults(self, model: ModelShape, device: DeviceInfo) -> Mapping[str, Default]:
        dtype, memory = device.dtypes[0], device.memory / GIB
        integrated = "integrated" in device.features
        tokens = 1024 if integrated else 8192 if memory >= 40 else 2048
        proposals = {
            "model.dtype": Default(dtype, _why_dtype(device)),
            "cache.block_size": Default(64, "what IPEX reads; Triton's kernels read any"),
            "scheduler.max_num_batched_tokens": Default(
                tokens,
                "few Xe cores: a longer step would hold up the running streams"
                if integrated
                else f"{memory:.0f} GiB leave room for the activations of a step that fills the device",
            ),
            "scheduler.max_num_seqs": Default(
                64 if integrated else 256,
                "more sequences at once share the same memory bandwidth"
                if integrated
                else "decoding is bound by memory up to about here",
            ),
        }
        if integrated:
            proposals["cache.memory_utilization"] = Default(
                SHARED_MEMORY, "the GPU shares the machine's memory with everything else on it"
            )
        return proposals

    def check(self, config: Any, device: DeviceInfo) -> Sequence[Problem]:
        problems = dtype_problems(config, device)
        world = config.device.tensor_parallel_size
        if device.arch not in FAMILIES:
            text = (
                f"{device.name} is of none of the families that are served ({', '.join(FAMILIES)})"
            )
            problems.append(Problem("error", f"{text}; use --device cpu"))
        # a described device has no versions: what is installed here says nothing about it
        if device.versions and "triton" not in device.versions:
            text = "no Triton with Intel's backend is installed here: without it most ops run unfused in PyTorch; "
            text += "pip install triton-xpu of the release that torch was built with"
            problems.append(Problem("warning", text))
        if "fp64" not in device.features:
            text = f"{device.arch} has no float64: tokens are drawn on the host"
            problems.append(Problem("warning", f"{text}, a copy of the logits for each step"))
        if world > 1 and config.device.worker == "inproc":
            problems.append(Problem("error", "tensor parallelism needs --worker process"))
        return problems

    def implementations(self) -> Iterable[Implementation]:
        return implementations.implementations(self.name)

    def open(self, device: DeviceInfo) -> DeviceRuntime:
        from headrace.platforms.xpu.runtime import XpuRuntime

        return XpuRuntime(device)


def _why_dtype(device: DeviceInfo) -> str:
    if device.arch == "dg2":
        return "bfloat16 is known to lose accuracy on Arc A"
    if "bf16" in device.features:
        return f"{device.arch} multiplies {device.dtypes[0]} on its matrix units"
    return f"{device.arch} has no matrix units, and no bfloat16 on the others"


def _notes(versions: Mapping[str, str], environment: Mapping[str, str]) -> Iterable[str]:
    """What a person should know of this machine's devices."""
    torch = hardware.release(versions.get("torch", ""))
    if torch < hardware.GRAPHS_SINCE:
        least = ".".join(str(part) for part in hardware.GRAPHS_SINCE)
        yield f"no graphs: torch {versions.get('torch', '')} is older than {least}, so each step is launched op by op"
    selector = environment.get("ONEAPI_DEVICE_SELECTOR")
    if selector:
        yield (
            f"ONEAPI_DEVICE_SELECTOR={selector} may number the devices otherwise than they are listed here; "
            "use ZE_AFFINITY_MASK instead"
        )


def _info(index: int, name: str, arch: str, memory: int, units: int, **rest: Any) -> DeviceInfo:
    """`rest`: versions and notes, of a device that is here."""
    can = hardware.features_of(arch), memory, max(units, 1), hardware.dtypes_of(arch)
    return DeviceInfo("xpu", index, name, arch, *can, **rest)
