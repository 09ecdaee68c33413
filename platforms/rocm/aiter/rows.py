"""The rows of a registry that AITER makes: metadata and verdicts. Imports neither torch nor AITER.

Sources of the limits: the package's own checks (its Python files and csrc/), at the versions that the tests'
aiter_facts.json names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.platforms.device import DeviceInfo
from headrace.platforms.queries import GroupQuery
from headrace.platforms.registry import Check, Implementation, Requirement, Verdict
from headrace.platforms.rocm.hardware import AITER, TRITON_NAMES
from headrace.platforms.torch_device import rows as torch_rows

NAME = "aiter"
# Architectures that AITER brings tuned kernels for.
ARCHS = ("gfx942", "gfx950")
HALVES = ("bfloat16", "float16")
# The block sizes that its attention is used with: for decodes a tile is a block, and three stages of larger ones fill
# the shared memory of a gfx942.
BLOCK_SIZES = (16, 32)
# Ranks that its all-reduce was written for.
WORLDS = (2, 4, 6, 8)
# Sizes and query heads that its latent attention was written for.
LATENT, LATENT_HEADS = (576, 512), (16, 128)
# What a thread block of its gating kernel sorts.
MOST_EXPERTS = 256

Device = Callable[[Check, DeviceInfo], Check]
Judge = Callable[[Any, Check], Check]


def padded_intermediate(intermediate: int) -> int:
    """The width that AITER's experts want: a multiple of 64 up to 192, else of 128."""
    step = 64 if intermediate <= 192 else 128
    return -(-intermediate // step) * step


def _halves(check: Check, dtype: str) -> Check:
    return check.need(dtype in HALVES, f"dtype {dtype} not in {HALVES}")


def _norm(query: Any, check: Check) -> Check:
    _halves(check, query.dtype).need(
        query.hidden % 8 == 0, f"rows of {query.hidden} are no multiple of 8"
    )
    return check.note("weights are rounded to the dtype of the activations")


def _activation(query: Any, check: Check) -> Check:
    return _halves(check, query.dtype).need(
        query.intermediate % 8 == 0, f"rows of {query.intermediate} are no multiple of 8"
    )


def _router(query: Any, check: Check) -> Check:
    check.need(query.plain, "it routes by softmax over all experts")
    check.need(query.experts <= MOST_EXPERTS, f"{query.experts} experts exceed {MOST_EXPERTS}")
    power = query.experts & (query.experts - 1) == 0
    return check.need(power, f"{query.experts} experts are no power of two")


def _experts(query: Any, check: Check) -> Check:
    _halves(check, query.dtype)
    for scheme in dict.fromkeys((query.scheme or query.dtype, query.down_scheme or query.dtype)):
        check.need(scheme == query.dtype, f"weights in {scheme} under {query.dtype}")
    check.need(
        query.activation == "silu",
        f"{query.activation}: which form of it AITER computes is not documented",
    )
    check.need(query.hidden % 128 == 0, f"hidden size {query.hidden} is no multiple of 128")
    width = padded_intermediate(query.intermediate)
    if width != query.intermediate:
        more = width / query.intermediate - 1
        check.note(f"pads intermediate {query.intermediate} to {width} ({more:+.0%} of weights)")
    return check


def _linear(query: Any, check: Check) -> Check:
    _halves(check, query.dtype)
    scheme = query.scheme or query.dtype
    check.need(scheme == query.dtype, f"weights in {scheme} under {query.dtype}")
    check.need(query.in_features % 8 == 0, f"{query.in_features} inputs are no multiple of 8")
    exact = query.out_dtype in ("", query.dtype)
    return check.need(exact, f"results in {query.out_dtype} would be rounded to {query.dtype}")


def _attention(query: Any, check: Check) -> Check:
    if query.latent:
        return _latent(query, check)
    _halves(check, query.dtype)
    check.need(query.kv_dtype == query.dtype, f"KV in {query.kv_dtype} under {query.dtype}")
    same = query.head_dim == query.v_head_dim
    check.need(same, f"keys of {query.head_dim} with values of {query.v_head_dim}")
    check.need(query.head_dim <= 256, f"heads of {query.head_dim} exceed 256")
    check.need(query.head_dim % 8 == 0, f"heads of {query.head_dim} are no multiple of 8")
    group, rest = divmod(query.q_heads, query.kv_heads)
    check.need(not rest, f"{query.q_heads} query heads are no multiple of {query.kv_heads}")
    check.need(group <= 128, f"{group} query heads for one KV head exceed 128")
    return check.note(f"reads blocks of {', '.join(map(str, BLOCK_SIZES))} tokens")


def _latent(query: Any, check: Check) -> Check:
    check.need(query.dtype == "bfloat16", f"dtype {query.dtype} is not bfloat16")
    check.need(query.kv_dtype == query.dtype, f"KV in {query.kv_dtype} under {query.dtype}")
    sizes = (query.head_dim, query.v_head_dim)
    check.need(sizes == LATENT, f"rows of {sizes[0]} with values of {sizes[1]} are not {LATENT}")
    heads = query.q_heads
    check.need(heads in LATENT_HEADS, f"{heads} query heads are none of {LATENT_HEADS}")
    plain = not (query.window or query.softcap or query.sinks)
    return check.need(plain, "a latent cache has neither window nor soft cap nor sinks")


def _group(query: GroupQuery, device: DeviceInfo, check: Check) -> Check:
    check.need(device.arch in ARCHS, f"{device.arch} is none of AITER's {ARCHS}")
    check.need(query.world in WORLDS, f"{query.world} ranks are none of {WORLDS}")
    check.need(query.same_node, "its ranks read each other's memory: they have to share a host")
    return check.note("sums of up to 8 MiB; RCCL does the rest")


def collectives(source: str) -> Implementation:
    """The row of AITER's all-reduce, for the platform named `source`."""
    target = "headrace.platforms.rocm.aiter.collectives:AiterCollectives"
    package = (Requirement(AITER, ">=0.1.7"),)
    return torch_rows.collectives(source, NAME, target, _group, rank=60, requires=package)


def implementations(source: str, known: Device) -> list[Implementation]:
    """All rows, for the platform named `source`."""

    def verdict(judge: Judge) -> Callable[[Any, DeviceInfo], Verdict]:
        def supports(query: Any, device: DeviceInfo) -> Verdict:
            check = known(Check(), device)
            check.need(device.arch in ARCHS, f"{device.arch} is none of AITER's {ARCHS}")
            return judge(query, check).verdict()

        return supports

    home = "headrace.platforms.rocm.aiter"
    # The linear layers rank below the shared ones: without a tuned table for a model's sizes they are PyTorch's own.
    rows: tuple[tuple[str, str, Judge, int], ...] = (
        ("paged_attention", "attention:attention_of", _attention, 60),
        ("fused_experts", "experts:AiterExperts", _experts, 60),
        ("topk_softmax", "experts:topk_softmax_of", _router, 60),
        ("rms_norm", "rowwise:RmsNorm", _norm, 60),
        ("fused_add_rms_norm", "rowwise:AddRmsNorm", _norm, 60),
        ("silu_and_mul", "rowwise:SiluAndMul", _activation, 60),
        ("gelu_and_mul", "rowwise:GeluAndMul", _activation, 60),
        ("gelu_tanh_and_mul", "rowwise:GeluTanhAndMul", _activation, 60),
        ("linear", "linear:AiterLinear", _linear, 40),
    )
    package = Requirement(AITER, ">=0.1.7")
    triton = Requirement(TRITON_NAMES[0], ">=3.2", TRITON_NAMES[1:])
    return [
        Implementation(
            op,
            NAME,
            f"{home}.{target}",
            rank=rank,
            requires=(package, triton) if op == "paged_attention" else (package,),
            supports=verdict(judge),
            source=source,
            per_query=True,
        )
        for op, target, judge, rank in rows
    ]
