"""The rows of a registry that torch_npu's ops make: metadata and verdicts. Imports neither torch nor torch_npu.

What an op cannot do is taken from the limits in torch_npu's own documentation of it, for the products of each
generation; what ran nowhere is "unverified" and has to pass the start-up self-test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.platforms.device import DeviceInfo
from headrace.platforms.npu import hardware
from headrace.platforms.registry import Check, Implementation, Requirement, Verdict

TORCH_NPU = "torch_npu"
FIA = "fia"
HALVES = ("bfloat16", "float16")
FLOATS = (*HALVES, "float32")

# Generations on which the contract tests were run by the project: none so far.
VERIFIED: frozenset[str] = frozenset()

WIDEST_HEAD = 256
MOST_HEADS = 256
WIDEST_KV = 65535  # KV heads * head size of a cache laid out [block, token, head * size]
WIDEST_ROTARY = 896
FUSED_ROTARY = (64, 128)
WIDEST_GROUPED = 65536  # last dimension of each operand of a grouped product
MOST_EXPERTS = 1024
MOST_CHOSEN = 1024


def _dtype(check: Check, dtype: str, device: DeviceInfo, known: tuple[str, ...] = FLOATS) -> Check:
    check.need(dtype in known, f"dtype {dtype} not in {known}")
    return check.need(
        dtype not in known or dtype in device.dtypes, f"{device.arch} does not compute in {dtype}"
    )


def _has(check: Check, feature: str, device: DeviceInfo, op: str) -> Check:
    return check.need(feature in device.features, f"{op} does not run on {device.arch}")


def _attention(query: Any, device: DeviceInfo, check: Check) -> Check:
    _dtype(check, query.dtype, device, HALVES)
    _has(check, "fused_attention", device, "npu_fused_infer_attention_score")
    check.need(
        query.kv_dtype == query.dtype, f"KV in {query.kv_dtype} beside {query.dtype} queries"
    )
    size = query.head_dim
    check.need(size == query.v_head_dim, f"keys of {size} beside values of {query.v_head_dim}")
    check.need(size <= WIDEST_HEAD, f"heads of {size} exceed {WIDEST_HEAD}")
    check.need(size % 16 == 0, f"heads of {size} are no multiple of 16")
    check.need(query.q_heads <= MOST_HEADS, f"{query.q_heads} heads exceed {MOST_HEADS}")
    group, rest = divmod(query.q_heads, query.kv_heads)
    check.need(not rest, f"{query.q_heads} query heads are no multiple of {query.kv_heads}")
    check.need(group <= 64, f"{group} query heads for one KV head exceed 64")
    wide = query.kv_heads * size
    check.need(wide <= WIDEST_KV, f"{query.kv_heads} KV heads of {size} exceed {WIDEST_KV} numbers")
    check.need(not query.softcap, "it has no soft cap of scores")
    return check.need(not query.sinks, "it has no attention sinks")


def _norm(query: Any, device: DeviceInfo, check: Check) -> Check:
    return _dtype(check, query.dtype, device)


def _add_norm(query: Any, device: DeviceInfo, check: Check) -> Check:
    return _has(_norm(query, device, check), "add_norm", device, "npu_add_rms_norm")


def _rotary_mul(query: Any, device: DeviceInfo, check: Check) -> Check:
    _dtype(check, query.dtype, device)
    _has(check, "rotary_mul", device, "npu_rotary_mul")
    size = query.rotary_dim
    return check.need(size < WIDEST_ROTARY, f"{size} rotated dimensions reach {WIDEST_ROTARY}")


def _apply_rotary(query: Any, device: DeviceInfo, check: Check) -> Check:
    _dtype(check, query.dtype, device)
    check.need(query.is_neox, "it pairs halves of a head, not neighbours")
    size = query.rotary_dim
    check.need(size == query.head_dim, f"it rotates whole heads, not {size} of {query.head_dim}")
    return check.need(
        query.head_dim in FUSED_ROTARY, f"heads of {query.head_dim} not in {FUSED_ROTARY}"
    )


def _swiglu(query: Any, device: DeviceInfo, check: Check) -> Check:
    _dtype(check, query.dtype, device)
    size = 2 * query.intermediate
    any_size = "bf16" in device.features
    return check.need(any_size or size % 32 == 0, f"rows of {size} are no multiple of 32")


def _geglu(query: Any, device: DeviceInfo, check: Check) -> Check:
    return _has(_dtype(check, query.dtype, device), "geglu", device, "npu_geglu")


def _linear(query: Any, device: DeviceInfo, check: Check) -> Check:
    scheme = query.scheme or query.dtype
    _dtype(check, query.dtype, device, HALVES)
    check.need(scheme in FLOATS, f"weights in {scheme} are dequantized at load, not computed with")
    for name, size in (("input", query.in_features), ("output", query.out_features)):
        check.need(size % 16 == 0, f"{size} {name} features are no multiple of 16")
    return check


def _router(query: Any, device: DeviceInfo, check: Check) -> Check:
    _has(check, "routing", device, "npu_moe_gating_top_k_softmax")
    check.need(query.plain, "it routes by softmax over all experts")
    return check.need(query.top_k <= MOST_CHOSEN, f"{query.top_k} experts a token")


def _experts(query: Any, device: DeviceInfo, check: Check) -> Check:
    _dtype(check, query.dtype, device)
    _has(check, "routing", device, "npu_moe_init_routing_v2")
    for scheme in dict.fromkeys((query.scheme or query.dtype, query.down_scheme or query.dtype)):
        check.need(
            scheme in FLOATS, f"weights in {scheme} are dequantized at load, not computed with"
        )
    check.need(
        1 < query.experts <= MOST_EXPERTS, f"{query.experts} experts not in 2..{MOST_EXPERTS}"
    )
    check.need(query.activation == "silu", f"it has no gated {query.activation}")
    widest = max(query.hidden, 2 * query.intermediate)
    return check.need(widest < WIDEST_GROUPED, f"rows of {widest} reach {WIDEST_GROUPED}")


def _host_sample(query: Any, device: DeviceInfo) -> Verdict:
    """Not a matter of doubt: it is the reference on the CPU, and the reference on such a device could not judge it."""
    searches = "search" in device.features
    check = Check().need(not searches, f"{device.arch} samples by itself, which is quicker")
    return check.note(f"on the CPU: {device.arch} cannot search in sorted rows").verdict()


def implementations(source: str = "npu") -> list[Implementation]:
    """All rows."""

    def verdict(judge: Callable[[Any, DeviceInfo, Check], Check]) -> Callable[..., Verdict]:
        def supports(query: Any, device: DeviceInfo) -> Verdict:
            return judge(query, device, known(Check(), device)).verdict()

        return supports

    home = "headrace.platforms.npu"
    rows: tuple[tuple[str, str, str, int, Any], ...] = (
        ("paged_attention", FIA, "attention:FusedInferAttention", 50, _attention),
        ("rms_norm", TORCH_NPU, "ops:RmsNorm", 50, _norm),
        ("fused_add_rms_norm", TORCH_NPU, "ops:AddRmsNorm", 50, _add_norm),
        ("rotary_embedding", "apply_rotary", "ops:ApplyRotary", 60, _apply_rotary),
        ("rotary_embedding", "rotary_mul", "ops:RotaryMul", 50, _rotary_mul),
        ("silu_and_mul", TORCH_NPU, "ops:Swiglu", 50, _swiglu),
        ("gelu_and_mul", TORCH_NPU, "ops:Geglu", 50, _geglu),
        ("gelu_tanh_and_mul", TORCH_NPU, "ops:GegluTanh", 50, _geglu),
        ("linear", "nz", "linear:NzLinear", 50, _linear),
        ("topk_softmax", TORCH_NPU, "experts:GatingTopKSoftmax", 50, _router),
        ("fused_experts", TORCH_NPU, "experts:GroupedExperts", 50, _experts),
    )
    table = [(op, name, target, rank, verdict(judge)) for op, name, target, rank, judge in rows]
    table.append(("sample", "host", "sampling:HostSample", 10, _host_sample))
    return [
        Implementation(
            op,
            name,
            f"{home}.{target}",
            rank=rank,
            requires=(Requirement("torch-npu", ">=2.9"),),
            supports=supports,
            source=source,
            per_query=True,
        )
        for op, name, target, rank, supports in table
    ]


def known(check: Check, device: DeviceInfo) -> Check:
    """What is true of all ops on this device."""
    check.need(device.arch in hardware.DESCRIBED, f"the ops were not written for {device.arch}")
    if device.arch not in VERIFIED:
        check.doubt(f"the project has not run it on {device.arch}")
    return check
