"""ExamplePlatform: what headrace asks before it loads anything. Metadata only; torch is not imported here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.platforms.device import DeviceInfo, DeviceRuntime
from headrace.platforms.platform import Default, ModelShape, Platform, Problem
from headrace.platforms.registry import Check, Implementation, Verdict

FLOATS = ("float32", "bfloat16", "float16")
GIB = 1 << 30

# arch -> name, memory, compute units. `headrace explain MODEL --device example:v2` works without the hardware.
ARCHS = {"v1": ("the first generation", 4 * GIB, 1), "v2": ("the second generation", 8 * GIB, 2)}
# Architectures on which `headrace conformance` was run and passed. On others the implementations are "unverified": the
# engine tests them against the reference when it starts, and uses the reference where they fail.
VERIFIED = frozenset({"v1"})


def _device(index: int, arch: str) -> DeviceInfo:
    name, memory, units = ARCHS[arch]
    return DeviceInfo(
        platform="example",
        index=index,
        name=f"example device, {name}",
        arch=arch,
        features=frozenset({"fused_norm"}),  # what your kernels may ask for
        memory=memory,
        units=units,
        dtypes=("float32", "bfloat16", "float16"),  # the preferred one first
        versions={
            "example runtime": "1.0"
        },  # of the driver and the libraries: shown, and kept in reports
        notes=("computes on the host's CPU through PyTorch",),
    )


class ExamplePlatform(Platform):
    # For a release of headrace with another number the platform is refused with a sentence. The base class has the
    # number of the release that you run; write down the one that you built for.
    api_version = 1
    name = "example"
    # `--device auto` takes the platform with the highest priority that has a device: GPUs have 100, the CPU 0. Below
    # zero, as here, it is only taken when asked for by name.
    priority = -5

    @classmethod
    def plausible(cls) -> str | None:
        """Cheap: look for a device file. A reason here is shown by `headrace doctor`."""
        return None

    @classmethod
    def probe(cls) -> list[DeviceInfo]:
        """Ask the driver. This runs in a process of its own: it may load libraries, and it may crash."""
        return [_device(0, "v1")]

    @classmethod
    def describe(cls, arch: str) -> DeviceInfo:
        if arch not in ARCHS:
            raise ValueError(f"no example arch named {arch!r}; known: {', '.join(ARCHS)}")
        return _device(0, arch)

    @classmethod
    def known_archs(cls) -> Sequence[str]:
        return tuple(ARCHS)

    def worker_env(self, device: DeviceInfo, rank: int, world: int) -> Mapping[str, str]:
        """For variables that a runtime reads when it is loaded."""
        return {"OMP_NUM_THREADS": str(device.units)}

    def defaults(self, model: ModelShape, device: DeviceInfo) -> Mapping[str, Default]:
        """Proposals, each with its reason: the user sees both, and wins."""
        return {
            "cache.block_size": Default(16, "the device reads keys in runs of 16"),
            "cache.kv_cache_memory": Default(device.memory // 16, "a small device"),
            "scheduler.max_num_batched_tokens": Default(256, "a longer step would not be faster"),
            "scheduler.max_num_seqs": Default(8, "a small device"),
        }

    def check(self, config: Any, device: DeviceInfo) -> Sequence[Problem]:
        """What cannot work on this device, with the way out."""
        if config.model.dtype not in ("auto", *device.dtypes):
            text = f"the example device does not compute in {config.model.dtype}; take one of: "
            return [Problem("error", text + ", ".join(device.dtypes))]
        return []

    def implementations(self) -> Iterable[Implementation]:
        """Your kernels. For every other op, and where a verdict is "no", the reference computes in plain PyTorch."""
        ops = "headrace_example.ops"
        for op, target, supports in (
            ("linear", "ExampleLinear", _linear),
            ("rms_norm", "rms_norm", _norm),
            ("fused_add_rms_norm", "fused_add_rms_norm", _norm),
        ):
            yield Implementation(
                op, "example", f"{ops}:{target}", rank=10, supports=supports, source=self.name
            )

        # Every start of a group of ranks tests it before the first sum; gloo through the host is what is left else.
        yield Implementation(
            "collectives",
            "example",
            "headrace_example.runtime:ExampleCollectives",
            rank=10,
            source=self.name,
        )

    def open(self, device: DeviceInfo) -> DeviceRuntime:
        from headrace_example.runtime import ExampleRuntime

        return ExampleRuntime(device)


# Verdicts are pure functions of data: they import nothing, so that they can be asked for any device on any machine.


def _known(check: Check, device: DeviceInfo) -> Check:
    if device.arch not in VERIFIED:
        check.doubt(f"nobody has run it on {device.arch} yet")
    return check


def _linear(query: Any, device: DeviceInfo) -> Verdict:
    scheme = query.scheme or query.dtype
    check = Check().need(query.dtype in FLOATS, f"dtype {query.dtype} not in {FLOATS}")
    check.need(scheme in FLOATS, f"weights in {scheme} are dequantized at load, not computed with")
    return _known(check, device).verdict()


def _norm(query: Any, device: DeviceInfo) -> Verdict:
    check = Check().need("fused_norm" in device.features, "this device has no fused norm")
    return _known(check, device).verdict()
