"""The queries that Triton's kernels are held to the reference on: sizes that are no power of two among them."""

from __future__ import annotations

from typing import Any

from headrace.platforms.queries import (
    ActivationQuery,
    AttentionQuery,
    ExpertsQuery,
    LinearQuery,
    NormQuery,
    RotaryQuery,
    RouterQuery,
    SampleQuery,
)

Named = tuple[str, Any]  # op, query


def attention(heads: int, kv_heads: int, size: int, dtype: str, **options: Any) -> Named:
    wide, kv = options.pop("v_head_dim", size), options.pop("kv_dtype", dtype)
    query = AttentionQuery(heads, kv_heads, size, wide, dtype, kv, size**-0.5, **options)
    return "paged_attention", query


def rows(dtype: str) -> list[Named]:
    """Everything but attention: small, as the interpreter takes its time."""
    gated = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
    return [
        ("rms_norm", NormQuery(96, dtype)),
        ("fused_add_rms_norm", NormQuery(96, dtype)),
        ("rotary_embedding", RotaryQuery(32, 32, dtype)),
        ("rotary_embedding", RotaryQuery(48, 24, dtype, is_neox=False)),
        *((op, ActivationQuery(96, dtype)) for op in gated),
        ("linear", LinearQuery(96, 80, dtype, bias=True)),
        ("linear", LinearQuery(512, 70, dtype, out_dtype="float32")),
    ]


def few_rows(dtype: str) -> list[Named]:
    """Products that are not the library's; K and N that no block divides."""
    return [
        ("linear", LinearQuery(100, 80, dtype, bias=True)),
        ("linear", LinearQuery(128, 70, dtype, out_dtype="float32")),
    ]


def wide_rows(dtype: str) -> list[Named]:
    """Real sizes, for a device."""
    return [
        ("rms_norm", NormQuery(8192, dtype)),
        ("fused_add_rms_norm", NormQuery(4096, dtype)),
        ("rotary_embedding", RotaryQuery(128, 128, dtype)),
        ("silu_and_mul", ActivationQuery(14336, dtype)),
        ("linear", LinearQuery(4096, 6144, dtype)),
        ("linear", LinearQuery(14336, 4096, dtype, bias=True)),
        ("linear", LinearQuery(576, 49152, dtype, out_dtype="float32")),
    ]


def attentions(dtype: str) -> list[Named]:
    return [
        attention(6, 2, 32, dtype),
        attention(8, 2, 48, dtype, window=20, softcap=5.0),
        attention(5, 1, 32, dtype, sinks=True, v_head_dim=16),
        attention(4, 4, 32, dtype, sinks=True, window=7),
        attention(4, 2, 32, dtype, kv_dtype="fp8_e4m3"),
    ]


def latents(dtype: str) -> list[Named]:
    """Attention over latent caches."""
    return [
        attention(4, 1, 40, dtype, v_head_dim=32, latent=True),
        attention(3, 1, 30, dtype, v_head_dim=24, kv_dtype="fp8_e4m3", latent=True),
    ]


def wide_latents(dtype: str) -> list[Named]:
    """DeepSeek-V2-Lite's, on a rank of eight of V3 too, V3, and a smaller one."""
    sizes = {"v_head_dim": 512, "latent": True}
    return [
        *(attention(heads, 1, 576, dtype, **sizes) for heads in (16, 128)),
        attention(40, 1, 288, dtype, v_head_dim=256, latent=True),
    ]


def wide_attentions(dtype: str) -> list[Named]:
    return [
        attention(32, 8, 128, dtype),
        attention(32, 8, 64, dtype, window=33),
        attention(32, 32, 80, dtype),
        attention(12, 4, 96, dtype, window=70, sinks=True),
        attention(4, 1, 256, dtype, window=100),
        attention(8, 4, 256, dtype, softcap=50.0),
        attention(64, 8, 64, dtype, window=128, sinks=True),
        attention(16, 1, 128, dtype),
        attention(32, 8, 128, dtype, kv_dtype="fp8_e4m3"),
    ]


def experts(dtype: str) -> list[Named]:
    """Sizes that no tile divides; routers of few and of many experts."""
    routers = ((8, 2, True), (60, 4, False), (128, 8, True), (5, 5, False))
    return [
        *(("topk_softmax", RouterQuery(*router)) for router in routers),
        ("topk_softmax", RouterQuery(20, 3, scale=1.5)),
        ("topk_softmax", RouterQuery(160, 6, groups=8, top_groups=3, scale=16.0)),
        ("topk_softmax", RouterQuery(64, 8, True, "sigmoid", 8, 4, True, 2.5)),
        ("topk_softmax", RouterQuery(12, 3, False, "sigmoid", bias=True)),
        ("fused_experts", ExpertsQuery(5, 2, 96, 80, dtype)),
        ("fused_experts", ExpertsQuery(24, 5, 64, 48, dtype, activation="gelu_tanh")),
    ]


def sorted_experts(dtype: str) -> list[Named]:
    return [("fused_experts", ExpertsQuery(12, 4, 32, 32, dtype, activation="gelu"))]


def tiled_experts(dtype: str) -> list[Named]:
    """Tokens of the cases fill tiles of several heights; sizes that no tile divides, and one without tiles."""
    return [
        *(("fused_experts", ExpertsQuery(count, 2, 80, 40, dtype)) for count in (24, 12, 5)),
        ("fused_experts", ExpertsQuery(3, 3, 64, 40, dtype, activation="gelu")),
        ("fused_experts", ExpertsQuery(4, 2, 36, 30, dtype)),
    ]


def wide_experts(dtype: str) -> list[Named]:
    """Shares of Mixtral 8x7B, Qwen1.5-MoE-A2.7B and Qwen3-30B-A3B."""
    return [
        ("topk_softmax", RouterQuery(128, 8, True)),
        ("fused_experts", ExpertsQuery(8, 2, 4096, 3584, dtype)),
        ("fused_experts", ExpertsQuery(60, 4, 2048, 1408, dtype, activation="gelu")),
        ("fused_experts", ExpertsQuery(128, 8, 2048, 768, dtype)),
    ]


def samples(_dtype: str) -> list[Named]:
    return [("sample", SampleQuery(300, 8))]


def logits(_dtype: str) -> list[Named]:
    """A vocabulary of one tile, and one of several."""
    ops = ("logprobs", "penalties", "token_bitmask")
    return [(op, SampleQuery(vocab, 5)) for op in ops for vocab in (70, 5000)]
