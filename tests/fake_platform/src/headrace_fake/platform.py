"""FakePlatform: metadata only, torch-free."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.platforms.device import DeviceInfo, DeviceRuntime
from headrace.platforms.platform import Default, ModelShape, Platform, Problem
from headrace.platforms.registry import Check, Implementation, Requirement, Verdict

ARCHS = ("hash", "count", "faulty", "unverified", "broken", "graphs")


def _device(index: int, arch: str) -> DeviceInfo:
    return DeviceInfo(
        platform="fake",
        index=index,
        name=f"fake device ({arch})",
        arch=arch,
        features=frozenset({"fake", arch}),
        memory=1 << 30,
        units=1,
        dtypes=("float32",),
        versions={"fake": "1.0"},
        notes=("computes nothing",),
    )


class FakePlatform(Platform):
    name = "fake"
    priority = -10

    @classmethod
    def plausible(cls) -> str | None:
        asked = os.environ.get("HEADRACE_FAKE_PROBE")
        return "there is no fake hardware here" if asked == "implausible" else None

    @classmethod
    def probe(cls) -> list[DeviceInfo]:
        asked = os.environ.get("HEADRACE_FAKE_PROBE", "")
        if asked == "raise":
            raise RuntimeError("the fake driver is too old")
        if asked == "crash":
            os.abort()
        if asked == "exit":
            sys.exit("the fake library ended the process")
        if asked == "hang":
            time.sleep(3600)
        if asked == "none":
            return []
        # two equal devices, as a machine has them: ranks of one engine take one each
        arch = os.environ.get("HEADRACE_FAKE_ARCH", "hash")
        return [_device(index, arch) for index in range(2)]

    @classmethod
    def describe(cls, arch: str) -> DeviceInfo:
        if arch not in ARCHS:
            raise ValueError(f"no fake arch named {arch!r}; known: {', '.join(ARCHS)}")
        return _device(0, arch)

    @classmethod
    def known_archs(cls) -> Sequence[str]:
        return ARCHS

    def worker_env(self, device: DeviceInfo, rank: int, world: int) -> Mapping[str, str]:
        return {"OMP_NUM_THREADS": "1", "HEADRACE_FAKE_RANK": str(rank)}

    def defaults(self, model: ModelShape, device: DeviceInfo) -> Mapping[str, Default]:
        return {
            "cache.kv_cache_memory": Default(16 << 20, "the fake device is small"),
            "scheduler.max_num_batched_tokens": Default(256, "the fake device likes small steps"),
        }

    def check(self, config: Any, device: DeviceInfo) -> Sequence[Problem]:
        if config.model.dtype not in ("auto", "float32"):
            return [Problem("error", "the fake device knows float32 only; leave out --dtype")]
        return []

    def implementations(self) -> Iterable[Implementation]:
        ops = "headrace_fake.ops"
        for op, target in (
            ("linear", "FakeLinear"),
            ("embedding", "FakeEmbedding"),
            ("paged_attention", "FakeAttention"),
            ("rms_norm", "rms_norm"),
            ("fused_add_rms_norm", "fused_add_rms_norm"),
            ("rotary_embedding", "rotary_embedding"),
            ("silu_and_mul", "gated"),
            ("gelu_and_mul", "gated"),
            ("gelu_tanh_and_mul", "gated"),
        ):
            yield Implementation(op, "fake", f"{ops}:{target}", rank=10, source="fake")
        yield Implementation(
            "paged_attention",
            "fake_graphs",
            f"{ops}:FakeGraphAttention",
            rank=20,
            supports=_graphs,
            source="fake",
        )
        yield Implementation(
            "sample",
            "kernels",
            "headrace_fake_kernels:sample",
            rank=90,
            requires=(Requirement("headrace-fake-kernels", ">=2"),),
            source="fake",
        )
        yield Implementation(
            "sample", "unlinked", "headrace_fake.missing:sample", rank=80, source="fake"
        )
        yield Implementation(
            "sample", "fresh", f"{ops}:sample", rank=70, supports=_fresh, source="fake"
        )
        yield Implementation(
            "sample", "wrong", f"{ops}:wrong_sample", rank=60, supports=_wrong, source="fake"
        )

        yield Implementation(
            "collectives",
            "fake",
            "headrace_fake.runtime:FakeCollectives",
            rank=10,
            source="fake",
        )

    def open(self, device: DeviceInfo) -> DeviceRuntime:
        from headrace_fake.runtime import FakeRuntime

        return FakeRuntime(device)


def _graphs(query: Any, device: DeviceInfo) -> Verdict:
    return Check().need("graphs" in device.features, "this device has no graphs").verdict()


def _fresh(query: Any, device: DeviceInfo) -> Verdict:
    check = Check().need("unverified" in device.features, "only on the unverified device")
    return check.doubt("never run on this device").verdict()


def _wrong(query: Any, device: DeviceInfo) -> Verdict:
    check = Check().need("broken" in device.features, "only on the broken device")
    return check.doubt("never run on this device").verdict()
