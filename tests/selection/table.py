"""The golden selection tables: synthetic devices x queries -> winner and every candidate's verdict.

Regenerate after a deliberate change, then read the diff:

    python -m tests.selection.table
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.platforms.cpu.builds import FEATURE
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.cuda.platform import CudaPlatform
from headrace.platforms.device import DeviceInfo
from headrace.platforms.npu.platform import NpuPlatform
from headrace.platforms.platform import Platform
from headrace.platforms.queries import (
    ActivationQuery,
    AttentionQuery,
    EmbeddingQuery,
    ExpertsQuery,
    LinearQuery,
    NormQuery,
    RotaryQuery,
    RouterQuery,
    SampleQuery,
)
from headrace.platforms.registry import (
    Implementation,
    Policy,
    Registry,
    SelectionError,
    SelfTest,
    select,
)
from headrace.platforms.rocm.platform import RocmPlatform
from headrace.platforms.xpu.platform import XpuPlatform

GOLDEN = Path(__file__).parent / "golden"


def queries(dtype: str) -> dict[str, tuple[str, Any]]:
    """Label -> (op, query): the layers of common models, and the edges of each verdict."""

    def attention(*shape: int, kv: str = dtype, **options: Any) -> AttentionQuery:
        heads, kv_heads, size = shape
        return AttentionQuery(heads, kv_heads, size, size, dtype, kv, size**-0.5, **options)

    return {
        "attention, 32/8 heads of 128": ("paged_attention", attention(32, 8, 128)),
        "attention, window 4096": ("paged_attention", attention(32, 8, 128, window=4096)),
        "attention, soft cap": ("paged_attention", attention(8, 4, 256, softcap=50.0)),
        "attention, window and sinks": (
            "paged_attention",
            attention(64, 8, 64, window=128, sinks=True),
        ),
        "attention, heads of 80": ("paged_attention", attention(32, 32, 80)),
        "attention, KV in fp8_e4m3": ("paged_attention", attention(32, 8, 128, kv="fp8_e4m3")),
        "attention, latent": (
            "paged_attention",
            AttentionQuery(16, 1, 576, 512, dtype, dtype, 192**-0.5, latent=True),
        ),
        "linear": ("linear", LinearQuery(4096, 14336, dtype)),
        "linear, Q4_K weights": ("linear", LinearQuery(4096, 14336, dtype, scheme="Q4_K")),
        "embedding": ("embedding", EmbeddingQuery(128256, 4096, dtype)),
        "rms_norm": ("rms_norm", NormQuery(4096, dtype)),
        "fused_add_rms_norm": ("fused_add_rms_norm", NormQuery(4096, dtype)),
        "rotary": ("rotary_embedding", RotaryQuery(128, 128, dtype)),
        "rotary, half of a head": ("rotary_embedding", RotaryQuery(128, 64, dtype, is_neox=False)),
        "silu": ("silu_and_mul", ActivationQuery(14336, dtype)),
        "gelu, tanh form": ("gelu_tanh_and_mul", ActivationQuery(14336, dtype)),
        "router": ("topk_softmax", RouterQuery(128, 8, True)),
        "router, sigmoid, groups and bias": (
            "topk_softmax",
            RouterQuery(256, 8, True, "sigmoid", groups=8, top_groups=4, bias=True, scale=2.5),
        ),
        "experts": ("fused_experts", ExpertsQuery(128, 8, 2048, 768, dtype)),
        "experts, Q4_K and Q6_K weights": (
            "fused_experts",
            ExpertsQuery(128, 8, 2048, 768, dtype, "Q4_K", "Q6_K"),
        ),
        "experts, halves of K blocks": (
            "fused_experts",
            ExpertsQuery(128, 8, 2048, 384, dtype, "Q4_K", "Q6_K"),
        ),
        "sample": ("sample", SampleQuery(128256, 64)),
    }


@dataclass(frozen=True)
class Scene:
    """One golden file: a device, what the user said, and how self-tests end."""

    name: str
    platform: Platform
    device: DeviceInfo
    policy: Policy = field(default_factory=Policy)
    dtype: str = ""  # "" = the device's preferred one
    self_tests: Mapping[str, SelfTest] = field(default_factory=dict)
    unlinked: frozenset[str] = frozenset()  # implementations whose library is not there
    versions: Mapping[str, str] = field(default_factory=dict)  # installed distributions


def cpu_scenes() -> list[Scene]:
    platform = CpuPlatform()
    described = {arch: platform.describe(arch) for arch in platform.known_archs()}
    # native kernels are unverified on Arm
    tests = {"native": SelfTest(True, "largest error 0.0e+00")}
    scenes = [
        Scene(f"cpu-{arch}", platform, device, self_tests=tests)
        for arch, device in described.items()
    ]
    amx, avx2 = described["amx"], described["avx2"]
    small = dataclasses.replace(avx2, memory=2 << 30, units=1, notes=("control group limit",))
    bare = dataclasses.replace(avx2, features=avx2.features - {FEATURE})
    return [
        *scenes,
        Scene("cpu-amx-float16", platform, amx, dtype="float16"),
        Scene("cpu-limited", platform, small),
        Scene("cpu-without-compiler", platform, bare),
        Scene("cpu-forced", platform, amx, Policy(force={"rms_norm": "reference", "linear": "no"})),
        Scene("cpu-disabled", platform, amx, Policy(disable=frozenset({"torch", "linear=native"}))),
    ]


def cuda_scenes() -> list[Scene]:
    platform = CudaPlatform()
    described = {arch: platform.describe(arch) for arch in platform.known_archs()}
    passed, triton = {"triton": SelfTest(True, "largest error 0.0e+00")}, {"triton": "3.6.0"}
    hopper = described["sm_90"]
    libraries = ("flashinfer", "flash_attention_3", "flash_attention_2")
    tests = passed | dict.fromkeys(libraries, passed["triton"])
    full = {**triton, "flashinfer-python": "0.7.4", "flash-attn": "2.8.3", "flash-attn-3": "3.0.0"}
    forced = Policy(force={"paged_attention": "flashinfer"})
    wrong = {**tests, "triton": SelfTest(False, "decode: largest error 1.0e+00")}
    return [
        *(
            Scene(f"cuda-{arch}", platform, device, self_tests=passed, versions=triton)
            for arch, device in described.items()
        ),
        Scene(
            "cuda-sm_90-float32",
            platform,
            hopper,
            dtype="float32",
            self_tests=passed,
            versions=triton,
        ),
        Scene("cuda-without-triton", platform, hopper),
        Scene("cuda-sm_90-libraries", platform, hopper, self_tests=tests, versions=full),
        Scene(
            "cuda-sm_100-flashinfer-forced",
            platform,
            described["sm_100"],
            forced,
            self_tests=tests,
            versions=full,
        ),
        Scene("cuda-sm_90-triton-fails", platform, hopper, self_tests=wrong, versions=full),
    ]


def npu_scenes() -> list[Scene]:
    platform = NpuPlatform()
    described = {arch: platform.describe(arch) for arch in platform.known_archs()}
    passed = SelfTest(True, "largest error 0.0e+00")
    names = {row.name for row in platform.implementations()}
    tests, here = dict.fromkeys(names, passed), {"torch-npu": "2.12.0"}
    atlas = described["910B"]
    wrong = {**tests, "fia": SelfTest(False, "padded, block size #0: largest error 1.0e+00")}
    return [
        *(
            Scene(f"npu-{arch}", platform, device, self_tests=tests, versions=here)
            for arch, device in described.items()
        ),
        Scene(
            "npu-910B-float32", platform, atlas, dtype="float32", self_tests=tests, versions=here
        ),
        Scene("npu-910B-fia-fails", platform, atlas, self_tests=wrong, versions=here),
        Scene("npu-910B-only-verified", platform, atlas, Policy(only_verified=True), versions=here),
        Scene("npu-910B-without-torch_npu", platform, atlas),
    ]


def rocm_scenes() -> list[Scene]:
    platform = RocmPlatform()
    described = {arch: platform.describe(arch) for arch in platform.known_archs()}
    passed = SelfTest(True, "largest error 0.0e+00")
    tests = {"triton": passed, "aiter": passed}
    plain, full = {"triton-rocm": "3.6.0"}, {"triton": "3.6.0", "amd-aiter": "0.1.7.post2"}
    mi300 = described["gfx942"]
    return [
        *(
            Scene(f"rocm-{arch}", platform, device, self_tests=tests, versions=full)
            for arch, device in described.items()
        ),
        Scene(
            "rocm-gfx942-float32", platform, mi300, dtype="float32", self_tests=tests, versions=full
        ),
        Scene("rocm-gfx942-without-aiter", platform, mi300, self_tests=tests, versions=plain),
    ]


def xpu_scenes() -> list[Scene]:
    platform = XpuPlatform()
    described = {arch: platform.describe(arch) for arch in platform.known_archs()}
    passed = SelfTest(True, "largest error 0.0e+00")
    tests, plain = {"triton": passed, "ipex": passed}, {"triton-xpu": "3.7.2"}
    full = {"pytorch-triton-xpu": "3.4.0", "torch": "2.8.0+xpu"}
    full |= {"intel-extension-for-pytorch": "2.8.10+xpu"}
    arc = described["bmg"]
    return [
        *(
            Scene(f"xpu-{arch}", platform, device, self_tests=tests, versions=full)
            for arch, device in described.items()
        ),
        Scene("xpu-bmg-float32", platform, arc, dtype="float32", self_tests=tests, versions=full),
        Scene("xpu-bmg-without-ipex", platform, arc, self_tests=tests, versions=plain),
        Scene("xpu-bmg-without-triton", platform, arc, self_tests=tests),
    ]


def fake_scenes() -> list[Scene]:
    """Needs the installed fake platform."""
    from headrace_fake.platform import FakePlatform

    platform = FakePlatform()
    device = platform.describe
    passed, failed = SelfTest(True, "largest error 0.0e+00"), SelfTest(False, "T=1: too far")
    tests = {"fresh": passed, "wrong": failed}
    nothing = frozenset({"unlinked"})
    unverified = Policy(only_verified=True), Policy(self_test=False)
    return [
        Scene("fake-verified", platform, device("hash"), unlinked=nothing),
        Scene(
            "fake-unverified-pass",
            platform,
            device("unverified"),
            self_tests=tests,
            unlinked=nothing,
        ),
        Scene(
            "fake-unverified-fail", platform, device("broken"), self_tests=tests, unlinked=nothing
        ),
        Scene(
            "fake-only-verified", platform, device("unverified"), unverified[0], unlinked=nothing
        ),
        Scene("fake-no-self-test", platform, device("broken"), unverified[1], unlinked=nothing),
        Scene("fake-forced-unmet", platform, device("hash"), Policy(force={"sample": "kernels"})),
        Scene("fake-disabled", platform, device("hash"), Policy(disable=frozenset({"unlinked"}))),
    ]


def table(scene: Scene) -> dict[str, Any]:
    """What is stored: for each query the winner and a line a candidate."""

    def load(row: Implementation) -> None:
        if row.name in scene.unlinked:
            raise ImportError(f"no module for {row.name}")

    registry = Registry.with_reference(scene.platform.implementations())
    rows: dict[str, Any] = {}
    for label, (op, query) in queries(scene.dtype or scene.device.dtypes[0]).items():
        try:
            decision = select(
                op,
                query,
                scene.device,
                registry,
                scene.policy,
                load=load,
                self_test=lambda row: scene.self_tests[row.name],
                versions=scene.versions.get,
            )
            chosen, candidates = decision.chosen, decision.candidates
        except SelectionError as error:
            chosen, candidates = f"error: {error}", error.candidates
        lines = {c.name: f"{c.status} {'; '.join(c.reasons)}".strip() for c in candidates}
        rows[label] = {"chosen": chosen, "candidates": lines}
    device = dataclasses.asdict(scene.device)
    device = {key: sorted(v) if isinstance(v, frozenset) else v for key, v in device.items()}
    policy = {
        key: sorted(v) if isinstance(v, frozenset) else v
        for key, v in dataclasses.asdict(scene.policy).items()
    }
    return {"device": device, "policy": policy, "selection": rows}


def text(scene: Scene) -> str:
    return json.dumps(table(scene), indent=1, default=dict) + "\n"


def write(scenes: list[Scene]) -> None:
    GOLDEN.mkdir(exist_ok=True)
    for scene in scenes:
        (GOLDEN / f"{scene.name}.json").write_text(text(scene))


def main() -> None:
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1] / "fake_platform" / "src"))
    scenes = [
        *cpu_scenes(),
        *cuda_scenes(),
        *npu_scenes(),
        *rocm_scenes(),
        *xpu_scenes(),
        *fake_scenes(),
    ]
    for path in GOLDEN.glob("*.json"):
        path.unlink()
    write(scenes)
    print(f"{len(scenes)} tables in {GOLDEN}")


if __name__ == "__main__":
    main()
