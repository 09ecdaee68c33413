"""The rows of a registry that attention libraries make: metadata and verdicts. Imports neither torch nor a library.

They rank below the shared kernels: a library serves where it was measured faster on the device (`headrace bench tune`),
where the shared kernels cannot, or where it is forced. Sources of the limits: the packages' own checks, at the versions
that the tests' vendor_facts.json names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.platforms.cuda.hardware import capability
from headrace.platforms.device import DeviceInfo
from headrace.platforms.registry import Check, Implementation, Requirement, Verdict

PACKAGES = ("flashinfer-python", "flash-attn-3", "flash-attn")
HALVES = ("bfloat16", "float16")
# FlashInfer's kernels are instantiated for any head; these are what the package builds and tests itself.
HEADS = (64, 128, 256)
# FlashAttention 3 reads blocks that fill whole tiles by a unit that does not leave out what lies behind a sequence's
# end, and what lies there may be NaN. These are smaller than its tiles.
BLOCK_SIZES = (16, 32)
# What FlashAttention 2 wants blocks to be a multiple of.
PAGE = 256

Judge = Callable[[Any, DeviceInfo, Check], Check]


def _common(query: Any, device: DeviceInfo, check: Check) -> Check:
    check.need(query.dtype in HALVES, f"dtype {query.dtype} not in {HALVES}")
    check.need(not query.latent, "it reads no latent cache")
    check.need(not query.sinks, "it knows no sinks")
    same = query.head_dim == query.v_head_dim
    check.need(same, f"keys of {query.head_dim} with values of {query.v_head_dim}")
    whole = query.q_heads % query.kv_heads == 0
    check.need(whole, f"{query.q_heads} query heads are no multiple of {query.kv_heads}")
    return check.need(capability(device.arch) >= 80, f"{device.arch} is older than sm_80")


def _flashinfer(query: Any, device: DeviceInfo, check: Check) -> Check:
    _common(query, device, check)
    check.need(query.head_dim in HEADS, f"heads of {query.head_dim} are none of {HEADS}")
    kv = (query.dtype, "fp8_e4m3")
    check.need(query.kv_dtype in kv, f"KV in {query.kv_dtype} under {query.dtype}")
    converts = query.kv_dtype != "fp8_e4m3" or "fp8" in device.features
    check.need(converts, f"{device.arch} does not convert fp8_e4m3")  # when it is written
    return check.note("compiles its kernels when they are first used, which needs nvcc and ninja")


def _flash_attention(query: Any, device: DeviceInfo, check: Check) -> Check:
    _common(query, device, check)
    check.need(query.kv_dtype == query.dtype, f"KV in {query.kv_dtype} under {query.dtype}")
    check.need(query.head_dim <= 256, f"heads of {query.head_dim} exceed 256")
    return check.need(query.head_dim % 8 == 0, f"heads of {query.head_dim} are no multiple of 8")


def _flash_attention_3(query: Any, device: DeviceInfo, check: Check) -> Check:
    check.need(device.arch == "sm_90", f"{device.arch} is not sm_90, which it was written for")
    return _flash_attention(query, device, check).note(
        f"reads blocks of {' or '.join(map(str, BLOCK_SIZES))} tokens"
    )


def _flash_attention_2(query: Any, device: DeviceInfo, check: Check) -> Check:
    return _flash_attention(query, device, check).note(
        f"reads blocks of multiples of {PAGE} tokens"
    )


def implementations(source: str) -> list[Implementation]:
    """All rows, for the platform named `source`."""

    def verdict(judge: Judge) -> Callable[[Any, DeviceInfo], Verdict]:
        def supports(query: Any, device: DeviceInfo) -> Verdict:
            check = Check().doubt("the project has not run it")
            return judge(query, device, check).verdict()

        return supports

    home = "headrace.platforms.cuda"
    triton = Requirement("triton", ">=3.2")  # its kernel writes the cache
    rows: tuple[tuple[str, str, Requirement, Judge, int], ...] = (
        (
            "flash_attention_3",
            "flash_attention:FlashAttention3",
            Requirement("flash-attn-3", ">=3.0.0b1"),
            _flash_attention_3,
            48,
        ),
        (
            "flashinfer",
            "flashinfer:FlashInferAttention",
            Requirement("flashinfer-python", ">=0.7"),
            _flashinfer,
            46,
        ),
        (
            "flash_attention_2",
            "flash_attention:FlashAttention2",
            Requirement("flash-attn", ">=2.8,<3"),
            _flash_attention_2,
            44,
        ),
    )
    return [
        Implementation(
            "paged_attention",
            name,
            f"{home}.{target}",
            rank=rank,
            requires=(package, triton),
            supports=verdict(judge),
            source=source,
        )
        for name, target, package, judge, rank in rows
    ]
