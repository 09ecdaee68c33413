"""Every op in plain PyTorch: the executable specification, the oracle in tests, the last fallback."""

from __future__ import annotations

from typing import Any

from headrace.platforms.collectives import OP as COLLECTIVES
from headrace.platforms.device import DeviceInfo
from headrace.platforms.kv_layout import SCALE_BYTES
from headrace.platforms.registry import REFERENCE, Check, Implementation, Verdict

FLOATS = ("float32", "bfloat16", "float16")
KV_DTYPES = (*FLOATS, "int8", "fp8_e4m3")


def _plain_weights(query: Any, _device: DeviceInfo) -> Verdict:
    scheme = query.scheme or query.dtype
    return (
        Check()
        .need(scheme in FLOATS, f"weights in {scheme} are dequantized at load, not computed with")
        .need(query.dtype in FLOATS, f"dtype {query.dtype} not in {FLOATS}")
        .verdict()
    )


def _plain_experts(query: Any, _device: DeviceInfo) -> Verdict:
    check = Check().need(query.dtype in FLOATS, f"dtype {query.dtype} not in {FLOATS}")
    for scheme in dict.fromkeys((query.scheme or query.dtype, query.down_scheme or query.dtype)):
        check.need(
            scheme in FLOATS, f"weights in {scheme} are dequantized at load, not computed with"
        )
    return check.verdict()


def _attention(query: Any, device: DeviceInfo) -> Verdict:
    check = Check()
    check.need(query.kv_dtype in KV_DTYPES, f"KV in {query.kv_dtype} not in {KV_DTYPES}")
    scaled = query.latent and query.kv_dtype in SCALE_BYTES
    check.need(not scaled, f"a latent cache has no scales, which {query.kv_dtype} needs")
    if query.kv_dtype == "fp8_e4m3":
        # it could, but who asks for a smaller cache does not want attention of one request at a time
        known = "fp8" in device.features and "fp8_fnuz" not in device.features
        check.need(known, f"{device.arch} does not convert fp8_e4m3")
    return check.verdict()


def _through_the_host(_query: Any, _device: DeviceInfo) -> Verdict:
    return Check().note("gloo, through the memory of the host").verdict()


def implementations() -> list[Implementation]:
    """One row for each op. Metadata only."""
    home = "headrace.platforms.reference"
    functions = {
        "rms_norm": "ops",
        "fused_add_rms_norm": "ops",
        "rotary_embedding": "ops",
        "silu_and_mul": "ops",
        "gelu_and_mul": "ops",
        "gelu_tanh_and_mul": "ops",
        "sample": "sampling",
        "logprobs": "sampling",
        "penalties": "sampling",
        "token_bitmask": "sampling",
    }
    rows = [
        Implementation(op, REFERENCE, f"{home}.{module}:{op}", source=REFERENCE)
        for op, module in functions.items()
    ]
    for op, target, supports in (
        ("linear", "linear:ReferenceLinear", _plain_weights),
        ("embedding", "linear:ReferenceEmbedding", _plain_weights),
        ("fused_experts", "experts:ReferenceExperts", _plain_experts),
        ("paged_attention", "attention:ReferenceAttention", _attention),
        (COLLECTIVES, "collectives:HostCollectives", _through_the_host),
    ):
        rows.append(
            Implementation(op, REFERENCE, f"{home}.{target}", supports=supports, source=REFERENCE)
        )
    router = f"{home}.experts:ReferenceRouter"
    rows.append(Implementation("topk_softmax", REFERENCE, router, source=REFERENCE, per_query=True))
    return rows
