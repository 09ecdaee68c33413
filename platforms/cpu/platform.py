"""The CPU as a platform: always there, probed without torch, described for CPUs that are not here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.platforms.cpu import hardware
from headrace.platforms.cpu.builds import FEATURE, HERE, native_build
from headrace.platforms.cpu.implementations import implementations
from headrace.platforms.device import DeviceInfo, DeviceRuntime
from headrace.platforms.platform import Default, ModelShape, Platform, Problem
from headrace.platforms.registry import Implementation

GIB = 1 << 30
KV_CAP = 4 * GIB  # a CPU rarely serves so many tokens at once that more would help

NOT_BUILT = (
    "the native kernels were not built: models run on PyTorch's operators, several times slower, and quantized ones "
    "are dequantized in memory; install a C++ compiler (apt install g++) and run: "
    "pip install --force-reinstall --no-deps --no-binary headrace headrace"
)


class CpuPlatform(Platform):
    name = "cpu"
    priority = 0  # taken when nothing else is there
    safe_probe = True

    @classmethod
    def probe(cls) -> list[DeviceInfo]:
        machine = hardware.Hardware()
        return [describe_machine(machine)]

    @classmethod
    def describe(cls, arch: str) -> DeviceInfo:
        if arch not in hardware.DESCRIBED:
            known = ", ".join(hardware.DESCRIBED)
            raise ValueError(f"no CPU arch named {arch!r}; known: {known}")
        return _info(hardware.DESCRIBED[arch], arch, f"a CPU with {arch}", 16 * GIB, 8)

    @classmethod
    def known_archs(cls) -> Sequence[str]:
        return tuple(hardware.DESCRIBED)

    def worker_env(self, device: DeviceInfo, rank: int, world: int) -> Mapping[str, str]:
        # `units` is what the machine allows, or what the user asked for: the workers share it
        threads = str(max(1, device.units // world))
        return {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            # Idle threads sleep: a server that waits for requests costs nothing.
            "OMP_WAIT_POLICY": "PASSIVE",
            "KMP_BLOCKTIME": "1",
            "GOMP_SPINCOUNT": "1000",
        }

    def defaults(self, model: ModelShape, device: DeviceInfo) -> Mapping[str, Default]:
        dtype = device.dtypes[0]
        native = dtype == "bfloat16"
        kv_bytes = kv_budget(device.memory)
        return {
            "model.dtype": Default(
                dtype,
                f"{device.arch} multiplies bfloat16 in hardware: half the memory traffic"
                if native
                else f"{device.arch} has no bfloat16 instructions",
            ),
            "cache.block_size": Default(32, "long enough runs for the copy of keys and values"),
            "cache.kv_cache_memory": Default(
                kv_bytes,
                f"a quarter of {device.memory / GIB:.1f} GiB, at most {KV_CAP // GIB} GiB; "
                "never more than is free at start",
            ),
            "scheduler.max_num_batched_tokens": Default(
                512, "a longer step would hold up the running streams on a CPU"
            ),
            "scheduler.max_num_seqs": Default(
                64, "more sequences at once share the same few cores"
            ),
        }

    def check(self, config: Any, device: DeviceInfo) -> Sequence[Problem]:
        problems = []
        dtype = config.model.dtype
        if dtype not in ("auto", *device.dtypes):
            text = f"dtype {dtype} does not run on a CPU; take one of: {', '.join(device.dtypes)}"
            problems.append(Problem("error", text))
        elif dtype == "float16" and "avx512_fp16" not in device.features:
            way_out = f"--dtype {device.dtypes[0]}"
            problems.append(
                Problem("warning", f"{device.arch} has no float16 arithmetic; {way_out} is faster")
            )
        elif dtype == "bfloat16" and not device.features & hardware.NATIVE_BF16:
            problems.append(
                Problem(
                    "warning",
                    f"{device.arch} has no bfloat16 instructions; --dtype float32 is faster",
                )
            )
        if FEATURE not in device.features:
            problems.append(Problem("warning", NOT_BUILT))
        threads, world = config.device.threads, config.device.tensor_parallel_size
        if threads * world > device.units:  # 0: worker_env shares the cores out
            who = f"{world} workers of {threads} threads" if world > 1 else f"{threads} threads"
            problems.append(
                Problem(
                    "warning",
                    f"{who} exceed the {device.units} cores that may be used; threads that wait "
                    "for a core slow all of them down",
                )
            )
        elif world > device.units:
            problems.append(
                Problem(
                    "warning", f"{world} workers share {device.units} cores: expect no speed-up"
                )
            )
        return problems

    def implementations(self) -> Iterable[Implementation]:
        return implementations()

    def open(self, device: DeviceInfo) -> DeviceRuntime:
        from headrace.platforms.cpu.runtime import CpuRuntime

        return CpuRuntime(device)


def kv_budget(memory: int) -> int:
    """Bytes of KV to ask for by default on a machine with `memory` bytes."""
    return min(KV_CAP, memory // 4)


def describe_machine(machine: hardware.Hardware, processors: set[int] | None = None) -> DeviceInfo:
    """DeviceInfo of the machine that `machine` reads."""
    flags = machine.flags()
    cores, memory = machine.cores(processors), machine.total_memory()
    notes = (f"threads: {cores.source}", f"memory: {memory.source}")
    return _info(
        flags,
        hardware.arch_of(flags),
        machine.name(),
        memory.value,
        cores.value,
        notes=notes,
        built=HERE,
    )


def _info(
    flags: frozenset[str],
    arch: str,
    name: str,
    memory: int,
    units: int,
    notes: tuple[str, ...] = (),
    built: Path | None = None,
) -> DeviceInfo:
    features = hardware.features_of(flags)
    # a described CPU is one where headrace was installed with a compiler at hand
    if built is None or native_build(features, built):
        features |= {FEATURE}
    fast = features & hardware.NATIVE_BF16
    return DeviceInfo(
        platform="cpu",
        index=0,
        name=name,
        arch=arch,
        features=features,
        memory=memory,
        units=units,
        dtypes=(("bfloat16", "float32", "float16") if fast else ("float32", "bfloat16", "float16")),
        notes=notes,
    )
