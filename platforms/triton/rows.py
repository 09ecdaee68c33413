"""The rows of a registry that these kernels make: metadata and verdicts. Imports neither torch nor Triton.

A platform calls `implementations` with its own say on the architecture: whether the kernels were run there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headrace.platforms.device import DeviceInfo
from headrace.platforms.registry import Check, Implementation, Requirement, Verdict

TRITON = "triton"
FLOATS = ("float32", "bfloat16", "float16")
KV_DTYPES = (*FLOATS, "fp8_e4m3")
# Ops whose kernels are newer than the last run of the contract tests on a device.
NEWER = frozenset({"paged_attention", "fused_experts"})
# What one program can hold of a row, in elements.
WIDEST_ROW = 65536
WIDEST_HEAD = 256
WIDEST_LATENT = 512
# Features of devices for which attention over latent caches compiles within the bounds of compile_all: matrix units
# whose operands are shared between threads, or registers for all of them.
HOLD_LATENTS = frozenset({"async_copy", "mfma"})
WIDEST_VOCAB = 500_000  # masses of so many tokens fit the integers they are summed in
MOST_EXPERTS = 1023
MOST_CHOSEN = 32

# Adds what the platform knows of the device: unmet needs and doubts.
Device = Callable[[Check, DeviceInfo], Check]


def _dtype(check: Check, dtype: str, device: DeviceInfo) -> Check:
    check.need(dtype in FLOATS, f"dtype {dtype} not in {FLOATS}")
    return check.need(
        dtype not in FLOATS or dtype in device.dtypes, f"{device.arch} does not compute in {dtype}"
    )


def _newer(op: str, check: Check) -> Check:
    if op in NEWER and check.verdict().status == "yes":  # not where nothing was ever run
        check.doubt("changed since it was last run on a device")
    return check


def _norm(query: Any, device: DeviceInfo, check: Check) -> Check:
    check.need(query.hidden <= WIDEST_ROW, f"rows of {query.hidden} exceed {WIDEST_ROW}")
    return check


def _rotary(query: Any, device: DeviceInfo, check: Check) -> Check:
    return check.need(query.rotary_dim <= 1024, f"{query.rotary_dim} rotated dimensions")


def _activation(query: Any, device: DeviceInfo, check: Check) -> Check:
    return check


def _linear(query: Any, device: DeviceInfo, check: Check) -> Check:
    scheme = query.scheme or query.dtype
    check.need(scheme in FLOATS, f"weights in {scheme} are dequantized at load, not computed with")
    return check


def _experts(query: Any, device: DeviceInfo, check: Check) -> Check:
    for scheme in dict.fromkeys((query.scheme or query.dtype, query.down_scheme or query.dtype)):
        check.need(
            scheme in FLOATS, f"weights in {scheme} are dequantized at load, not computed with"
        )
    check.need(query.experts <= MOST_EXPERTS, f"{query.experts} experts exceed {MOST_EXPERTS}")
    return check.need(query.top_k <= MOST_CHOSEN, f"{query.top_k} of them exceed {MOST_CHOSEN}")


def _attention(query: Any, device: DeviceInfo, check: Check) -> Check:
    check.need(query.kv_dtype in KV_DTYPES, f"KV in {query.kv_dtype} not in {KV_DTYPES}")
    if query.kv_dtype == "fp8_e4m3":
        known = "fp8" in device.features and "fp8_fnuz" not in device.features
        check.need(known, f"{device.arch} does not convert fp8_e4m3")
    if query.latent:
        return _latent(query, device, check)
    widest = max(query.head_dim, query.v_head_dim)
    check.need(widest <= WIDEST_HEAD, f"heads of {widest} exceed {WIDEST_HEAD}")
    group, rest = divmod(query.q_heads, query.kv_heads)
    check.need(not rest, f"{query.q_heads} query heads are no multiple of {query.kv_heads}")
    return check.need(group <= 64, f"{group} query heads for one KV head exceed 64")


def _latent(query: Any, device: DeviceInfo, check: Check) -> Check:
    holds = device.features & HOLD_LATENTS
    check.need(bool(holds), f"registers of {device.arch} do not hold rows of a latent cache")
    rest = query.head_dim - query.v_head_dim
    check.need(query.kv_heads == 1, f"{query.kv_heads} KV heads: a latent cache is one")
    wide = query.v_head_dim
    check.need(wide <= WIDEST_LATENT, f"values of {wide} exceed {WIDEST_LATENT}")
    check.need(0 < rest <= WIDEST_LATENT // 4, f"{rest} numbers behind the values")
    plain = not (query.window or query.softcap or query.sinks)
    check.need(plain, "a latent cache has neither window nor soft cap nor sinks")
    if check.verdict().status == "yes":
        check.doubt("its contract tests were never run on a device")
    return check


def implementations(
    source: str, known: Device, names: Sequence[str] = (TRITON,)
) -> list[Implementation]:
    """All rows, for the platform named `source`. `names`: of distributions, one of which brings Triton there."""

    def samples(op: str, query: Any, device: DeviceInfo) -> Verdict:
        check = _newer(op, known(Check(), device))
        check.need(query.vocab <= WIDEST_VOCAB, f"{query.vocab} tokens exceed {WIDEST_VOCAB}")
        return check.verdict()

    def routes(query: Any, device: DeviceInfo) -> Verdict:
        check = _newer("topk_softmax", known(Check(), device))
        check.need(query.experts <= MOST_EXPERTS, f"{query.experts} experts exceed {MOST_EXPERTS}")
        check.need(query.top_k <= MOST_CHOSEN, f"{query.top_k} of them exceed {MOST_CHOSEN}")
        check.need(query.experts % query.groups == 0, f"{query.groups} groups are unlike in size")
        return check.verdict()

    def verdict(
        op: str, judge: Callable[[Any, DeviceInfo, Check], Check]
    ) -> Callable[..., Verdict]:
        def supports(query: Any, device: DeviceInfo) -> Verdict:
            check = _dtype(known(Check(), device), query.dtype, device)
            return judge(query, device, _newer(op, check)).verdict()

        return supports

    home = "headrace.platforms.triton"
    rows = (
        ("linear", f"{home}.linear:TritonLinear", _linear),
        ("fused_experts", f"{home}.experts:TritonExperts", _experts),
        ("paged_attention", f"{home}.mla:attention_of", _attention),
        ("rms_norm", f"{home}.norms:RmsNorm", _norm),
        ("fused_add_rms_norm", f"{home}.norms:AddRmsNorm", _norm),
        ("rotary_embedding", f"{home}.rotary:Rotary", _rotary),
        ("silu_and_mul", f"{home}.activations:SiluAndMul", _activation),
        ("gelu_and_mul", f"{home}.activations:GeluAndMul", _activation),
        ("gelu_tanh_and_mul", f"{home}.activations:GeluTanhAndMul", _activation),
    )
    table = [(op, target, verdict(op, judge)) for op, target, judge in rows]
    logits = (
        ("sample", "sampling:Sample"),
        ("logprobs", "logprobs:Logprobs"),
        ("penalties", "penalties:Penalties"),
        ("token_bitmask", "penalties:TokenBitmask"),
    )
    table += [(op, f"{home}.{target}", partial(samples, op)) for op, target in logits]
    table.append(("topk_softmax", f"{home}.routing:TopkSoftmax", routes))
    return [
        Implementation(
            op,
            TRITON,
            target,
            rank=50,
            requires=(Requirement(names[0], ">=3.2", tuple(names[1:])),),
            supports=supports,
            source=source,
            per_query=True,
        )
        for op, target, supports in table
    ]
