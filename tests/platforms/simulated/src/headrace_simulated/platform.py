"""SimPlatform: metadata only, torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.platforms.device import DeviceInfo, DeviceRuntime
from headrace.platforms.platform import Default, ModelShape, Platform, Problem
from headrace.platforms.registry import Implementation


def _device(index: int) -> DeviceInfo:
    return DeviceInfo(
        platform="sim",
        index=index,
        name="a simulated accelerator",
        arch="sim",
        memory=1 << 30,
        dtypes=("float32", "bfloat16"),
    )


class SimPlatform(Platform):
    name = "sim"
    priority = -30

    @classmethod
    def probe(cls) -> list[DeviceInfo]:
        return [_device(index) for index in range(2)]

    @classmethod
    def describe(cls, arch: str) -> DeviceInfo:
        if arch != "sim":
            raise ValueError(f"no sim arch named {arch!r}; known: sim")
        return _device(0)

    def worker_env(self, device: DeviceInfo, rank: int, world: int) -> Mapping[str, str]:
        return {"OMP_NUM_THREADS": "1"}

    def defaults(self, model: ModelShape, device: DeviceInfo) -> Mapping[str, Default]:
        return {"cache.kv_cache_memory": Default(16 << 20, "the simulated device is small")}

    def check(self, config: Any, device: DeviceInfo) -> Sequence[Problem]:
        return []

    def implementations(self) -> Iterable[Implementation]:
        target = "headrace_simulated.attention:SimAttention"
        yield Implementation("paged_attention", "sim", target, rank=10, source="sim")
        target = "headrace_simulated.sampling:SimSample"
        yield Implementation("sample", "sim", target, rank=10, per_query=True, source="sim")

    def open(self, device: DeviceInfo) -> DeviceRuntime:
        from headrace_simulated.runtime import SimRuntime

        return SimRuntime(device)
