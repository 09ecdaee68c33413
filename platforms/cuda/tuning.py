"""How the shared kernels are launched on NVIDIA's devices with much shared memory. Torch-free.

What is here was fastest on an H200 (benchmarks/cuda/trials.py); others keep what the kernels propose, which fits the
100 KiB of the smaller devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PRODUCT = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
_EXPERTS = {
    ("experts_gate_up", 16): (32, 128, 4, 4),
    ("experts_gate_up", 32): (64, 128, 4, 3),
    ("experts_gate_up", 64): (128, 64, 4, 4),
    ("experts_gate_up", 128): (128, 64, 8, 4),
}
# Over tiles that the device copies, where Triton can ask for it; shorter ones are as fast without.
_TILED = ("PROGRAMS", *_PRODUCT)
_TILED_EXPERTS = {
    ("experts_gate_up", 64): (1, 128, 64, 4, 4),
    ("experts_down", 64): (2, 128, 64, 4, 4),
    ("experts_gate_up", 128): (1, 128, 64, 8, 4),
    ("experts_down", 128): (2, 128, 64, 4, 3),
}
# Decodes by the query heads of a KV head: BLOCK_N, warps, stages.
_FEW_DECODES = {8: (128, 4, 3)}
_MANY_DECODES = (32, 1, 2)
# By the size of heads, up to which they serve: BLOCK_M, BLOCK_N, warps, stages and programs a unit of prompts.
_PROMPTS = {64: (128, 64, 4, 3, 0), 128: (64, 64, 4, 3, 2), 256: (128, 64, 8, 2, 1)}
_PROMPTS_BESIDE = {**_PROMPTS, 128: (64, 64, 4, 3, 1)}  # decodes
_DECODES_BESIDE = {4: (32, 1, 3), 8: (16, 1, 3)}  # prompts of such heads; as _FEW_DECODES


def kernel_options(
    features: frozenset[str], kernel: str, query: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The launch options of a shared kernel that a device with these features wants changed."""
    if "tma" not in features or getattr(query, "dtype", "float32") == "float32":
        return {}
    if kernel.startswith("experts_"):
        named = (kernel, options.get("BLOCK_M", 0))
        if "TILED" in options and named in _TILED_EXPERTS:
            return {"TILED": True, **dict(zip(_TILED, _TILED_EXPERTS[named], strict=True))}
        chosen = _EXPERTS.get(named)
        return dict(zip(_PRODUCT, chosen, strict=True)) if chosen else {}
    if kernel in ("prefill", "prefill_beside"):
        widest = max(query.head_dim, query.v_head_dim)
        table = _PROMPTS if kernel == "prefill" else _PROMPTS_BESIDE
        prompts = next(chosen for size, chosen in table.items() if widest <= size)
        if widest > 128 and query.softcap:  # whose tangents take registers
            prompts = (128, 32, 8, 3, 1)
        names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "PROGRAMS")
        return dict(zip(names, prompts, strict=True))
    if kernel.startswith("decode") and query.head_dim <= 128 >= query.v_head_dim:
        group = query.q_heads // query.kv_heads
        decode = _FEW_DECODES.get(group) if kernel == "decode" else _MANY_DECODES
        ahead = kernel == "decode_beside" and max(query.head_dim, query.v_head_dim) > 64
        if ahead:
            decode = _DECODES_BESIDE.get(group, _DECODES_BESIDE[4])
        if not decode:
            return {}
        wanted = dict(zip(("BLOCK_N", "num_warps", "num_stages"), decode, strict=True))
        return {**wanted, "AHEAD": ahead}
    return {}
