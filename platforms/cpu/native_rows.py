"""What the native kernel library brings: metadata and verdicts. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.platforms.cpu.builds import FEATURE
from headrace.platforms.device import DeviceInfo
from headrace.platforms.registry import Check, Implementation, Verdict

NATIVE = "native"
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8")
# Block types the kernels compute on, with the weights of a block.
BLOCKS = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), 32),
    **dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"), 256),
}


def _has_build(device: DeviceInfo) -> Check:
    check = Check().need(
        FEATURE in device.features, "the native kernels are not built: see `headrace doctor`"
    )
    if "neon" in device.features:
        check.doubt("never run on an Arm machine of the project")
    return check


def _built(query: Any, device: DeviceInfo) -> Check:
    return _has_build(device).need(query.dtype in DTYPES, f"dtype {query.dtype} not in {DTYPES}")


def _elementwise(query: Any, device: DeviceInfo) -> Verdict:
    return _built(query, device).verdict()


def _matrix(query: Any, device: DeviceInfo) -> Verdict:
    width = query.in_features if hasattr(query, "in_features") else query.hidden
    return _weights(_built(query, device), query.scheme or query.dtype, width).verdict()


def _experts(query: Any, device: DeviceInfo) -> Verdict:
    matrices = {
        (query.scheme or query.dtype, query.hidden): None,
        (query.down_scheme or query.dtype, query.intermediate): None,
    }
    check = _built(query, device)
    for scheme, width in matrices:
        _weights(check, scheme, width)
    return check.verdict()


def _weights(check: Check, scheme: str, width: int) -> Check:
    """A matrix with rows of `width` weights stored in `scheme`."""
    check.need(scheme in BLOCKS or scheme in DTYPES, f"no kernel for weights in {scheme}")
    block = BLOCKS.get(scheme, 2 if scheme == "bfloat16" else 1)
    check.need(width % block == 0, f"rows of {width} are no multiple of {block} weights")
    if scheme == "float16":
        check.note("float16 weights are widened to float32 in registers")
    if scheme in BLOCKS:
        check.note(f"computes on the blocks of {scheme}, activations rounded to 8 bits")
    return check


def _sample(query: Any, device: DeviceInfo) -> Verdict:
    return _has_build(device).verdict()


def _router(query: Any, device: DeviceInfo) -> Verdict:
    return _has_build(device).need(query.plain, "it routes by softmax over all experts").verdict()


def _attention(query: Any, device: DeviceInfo) -> Verdict:
    check = _built(query, device)
    check.need(query.kv_dtype in KV_DTYPES, f"KV in {query.kv_dtype} not in {KV_DTYPES}")
    check.need(query.head_dim % 16 == 0, f"head size {query.head_dim} is no multiple of 16")
    check.need(query.head_dim == query.v_head_dim, "keys and values of unlike size")
    group, rest = divmod(query.q_heads, query.kv_heads)
    check.need(not rest and group <= 32, f"{query.q_heads} query heads, {query.kv_heads} KV heads")
    return check.verdict()


def native_implementations() -> list[Implementation]:
    ops, attention = "native_ops", "native_attention"
    rows: tuple[tuple[str, str, Callable[[Any, DeviceInfo], Verdict]], ...] = (
        ("linear", f"{ops}:NativeLinear", _matrix),
        ("embedding", f"{ops}:NativeEmbedding", _matrix),
        ("topk_softmax", "experts:NativeRouter", _router),
        ("fused_experts", "experts:NativeExperts", _experts),
        ("paged_attention", f"{attention}:NativeAttention", _attention),
        ("rms_norm", f"{ops}:NativeNorm", _elementwise),
        ("fused_add_rms_norm", f"{ops}:NativeAddNorm", _elementwise),
        ("rotary_embedding", f"{ops}:NativeRotary", _elementwise),
        ("silu_and_mul", f"{ops}:NativeSiluAndMul", _elementwise),
        ("gelu_and_mul", f"{ops}:NativeGeluAndMul", _elementwise),
        ("gelu_tanh_and_mul", f"{ops}:NativeGeluTanhAndMul", _elementwise),
        ("sample", f"{ops}:NativeSample", _sample),
        ("logprobs", f"{ops}:NativeLogprobs", _sample),
    )
    return [
        Implementation(
            op,
            NATIVE,
            f"headrace.platforms.cpu.{target}",
            rank=50,
            supports=supports,
            source="cpu",
            per_query=True,
        )
        for op, target, supports in rows
    ]
