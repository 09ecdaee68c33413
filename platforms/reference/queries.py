"""The queries that every implementation is held to the reference on: shapes of models, and sizes that are no power of
two. Torch-free: `headrace conformance` lists them before a device is opened."""

from __future__ import annotations

from typing import Any

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

DTYPES = ("float32", "bfloat16", "float16")


def attention_queries(dtype: str) -> list[AttentionQuery]:
    def query(q_heads: int, kv_heads: int, size: int, **options: Any) -> AttentionQuery:
        return AttentionQuery(q_heads, kv_heads, size, size, dtype, dtype, size**-0.5, **options)

    shapes = [(9, 3, 64), (4, 4, 128), (8, 1, 256), (6, 2, 80), (2, 1, 40)]
    queries = [query(*shape) for shape in shapes]
    queries += [query(6, 2, 64, window=window) for window in (15, 16, 17, 64)]
    for window, softcap, sinks in ((0, 20.0, False), (0, 0.0, True), (16, 20.0, True)):
        queries.append(query(6, 2, 64, window=window, softcap=softcap, sinks=sinks))
    queries.append(AttentionQuery(4, 2, 96, 64, dtype, dtype, 0.1))  # keys wider than values
    # latent caches: a small one, and DeepSeek's sizes
    queries.append(AttentionQuery(5, 1, 80, 64, dtype, dtype, 0.1, latent=True))
    queries.append(AttentionQuery(16, 1, 576, 512, dtype, dtype, 576**-0.5, latent=True))
    if dtype == "float32":
        queries.append(AttentionQuery(4, 2, 64, 64, dtype, "bfloat16", 0.125))  # smaller KV
        latent = (4, 1, 40, 32, dtype)
        queries += [AttentionQuery(*latent, kv, 0.1, latent=True) for kv in DTYPES[1:]]
    return queries


def queries(op: str) -> list[Any]:
    """All queries of an op, in every dtype. A device or an implementation refuses those that it cannot serve."""
    made: list[Any] = []
    for dtype in DTYPES:
        if op == "linear":
            sizes = [(576, 1536), (64, 96), (100, 7), (1, 1)]
            made += [LinearQuery(i, o, dtype, bias=b) for (i, o) in sizes for b in (False, True)]
            made.append(LinearQuery(64, 96, dtype, out_dtype="float32"))
            if (
                dtype == "bfloat16"
            ):  # activations may be rounded to 8 bits: no dtype with more of them
                made += [LinearQuery(*size, dtype, "Q4_0") for size in ((576, 1536), (64, 96))]
        elif op == "embedding":
            made += [EmbeddingQuery(300, 96, dtype, scale=scale) for scale in (1.0, 24.0)]
        elif op in ("rms_norm", "fused_add_rms_norm"):
            made += [NormQuery(hidden, dtype) for hidden in (576, 64, 100, 1)]
        elif op == "rotary_embedding":
            sizes = [(64, 64), (64, 16), (80, 80), (256, 128)]
            made += [RotaryQuery(d, r, dtype, neox) for (d, r) in sizes for neox in (True, False)]
        elif op.endswith("_and_mul"):
            made += [ActivationQuery(size, dtype) for size in (1536, 100, 1)]
        elif op == "fused_experts":
            experts = [(8, 2, 64, 96), (16, 4, 96, 32), (3, 3, 34, 10), (1, 1, 64, 32)]
            made += [ExpertsQuery(*size, dtype) for size in experts]
            made += [ExpertsQuery(4, 2, 64, 32, dtype, activation=a) for a in ("gelu", "gelu_tanh")]
        elif op == "paged_attention":
            made += attention_queries(dtype)
    if op == "topk_softmax":
        sizes = [(8, 2), (128, 8), (60, 4), (3, 3), (1, 1)]
        made = [RouterQuery(*size, renormalize) for size in sizes for renormalize in (True, False)]
        made += [
            RouterQuery(64, 6, scale=1.5),
            RouterQuery(160, 6, groups=8, top_groups=3, scale=16.0),
            RouterQuery(256, 8, True, "sigmoid", 8, 4, True, 2.5),
            RouterQuery(12, 3, False, "sigmoid", bias=True),
        ]
    if op in ("sample", "logprobs", "penalties", "token_bitmask"):
        made = [SampleQuery(vocab, 8) for vocab in (3, 100, 9000)]
    return made
