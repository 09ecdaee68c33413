"""What the CPU platform brings: metadata and verdicts. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.platforms.cpu.native_rows import native_implementations
from headrace.platforms.device import DeviceInfo
from headrace.platforms.kv_layout import SCALE_BYTES
from headrace.platforms.registry import Check, Implementation, Verdict, always

FLOATS = ("float32", "bfloat16", "float16")
KV_DTYPES = (*FLOATS, "int8")
TORCH = "torch"  # PyTorch's own CPU operators, put together for this device


def _note_bf16(check: Check, dtype: str, device: DeviceInfo) -> Check:
    if dtype == "bfloat16":
        if "amx_bf16" in device.features:
            check.note("matrix products on AMX tiles")
        elif not device.features & {"avx512_bf16", "neon_bf16"}:
            check.note("bfloat16 is emulated on this CPU: float32 is faster")
    return check


def _linear(query: Any, device: DeviceInfo) -> Verdict:
    scheme = query.scheme or query.dtype
    check = Check().need(
        scheme in FLOATS, f"weights in {scheme} are dequantized at load, not computed with"
    )
    check.need(query.dtype in FLOATS, f"dtype {query.dtype} not in {FLOATS}")
    return _note_bf16(check, query.dtype, device).verdict()


def _experts(query: Any, device: DeviceInfo) -> Verdict:
    check = Check().need(query.dtype in FLOATS, f"dtype {query.dtype} not in {FLOATS}")
    for scheme in dict.fromkeys((query.scheme or query.dtype, query.down_scheme or query.dtype)):
        check.need(
            scheme in FLOATS, f"weights in {scheme} are dequantized at load, not computed with"
        )
    return _note_bf16(check, query.dtype, device).verdict()


def _attention(query: Any, device: DeviceInfo) -> Verdict:
    check = Check().need(query.kv_dtype in KV_DTYPES, f"KV in {query.kv_dtype} not in {KV_DTYPES}")
    scaled = query.latent and query.kv_dtype in SCALE_BYTES
    check.need(not scaled, f"a latent cache has no scales, which {query.kv_dtype} needs")
    check.need(
        query.q_heads % query.kv_heads == 0,
        f"{query.q_heads} query heads are no multiple of {query.kv_heads} KV heads",
    )
    return _note_bf16(check, query.dtype, device).verdict()


def implementations() -> list[Implementation]:
    home = "headrace.platforms.cpu"
    rows: tuple[tuple[str, str, Callable[[Any, DeviceInfo], Verdict]], ...] = (
        ("linear", f"{home}.ops:TorchLinear", _linear),
        ("fused_experts", f"{home}.experts:TorchExperts", _experts),
        ("paged_attention", f"{home}.attention:TorchAttention", _attention),
        ("rms_norm", f"{home}.ops:rms_norm", always),
        ("fused_add_rms_norm", f"{home}.ops:fused_add_rms_norm", always),
        ("rotary_embedding", f"{home}.ops:rotary_embedding", always),
        ("silu_and_mul", f"{home}.ops:silu_and_mul", always),
        ("gelu_and_mul", f"{home}.ops:gelu_and_mul", always),
        ("gelu_tanh_and_mul", f"{home}.ops:gelu_tanh_and_mul", always),
        ("sample", f"{home}.sampling:sample", always),
    )
    torch_rows = [
        Implementation(op, TORCH, target, rank=10, supports=supports, source="cpu")
        for op, target, supports in rows
    ]
    return [*native_implementations(), *torch_rows]
