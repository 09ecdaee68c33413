"""Every implementation that is here against the reference, over the contracts' generated inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.ops import CONTRACTS
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
from headrace.platforms.reference.compare import compare
from headrace.platforms.registry import REFERENCE, Registry, SelectionError

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
    if dtype == "float32":
        queries.append(AttentionQuery(4, 2, 64, 64, dtype, "bfloat16", 0.125))  # smaller KV
    return queries


def queries(op: str) -> list[Any]:
    made: list[Any] = []
    for dtype in DTYPES:
        if op == "linear":
            sizes = [(576, 1536), (64, 96), (100, 7), (1, 1)]
            made += [LinearQuery(i, o, dtype, bias=b) for (i, o) in sizes for b in (False, True)]
            made.append(LinearQuery(64, 96, dtype, out_dtype="float32"))
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
            sizes = [(8, 2, 64, 96), (16, 4, 96, 32), (3, 3, 34, 10), (1, 1, 64, 32)]
            made += [ExpertsQuery(*size, dtype) for size in sizes]
            made += [ExpertsQuery(4, 2, 64, 32, dtype, activation=a) for a in ("gelu", "gelu_tanh")]
        elif op == "paged_attention":
            made += attention_queries(dtype)
    if op == "topk_softmax":
        sizes = [(8, 2), (128, 8), (60, 4), (3, 3), (1, 1)]
        made = [RouterQuery(*size, renormalize) for size in sizes for renormalize in (True, False)]
    if op == "sample":
        made = [SampleQuery(vocab, 8) for vocab in (3, 100, 9000)]
    return made


def rows() -> list[Any]:
    registry = Registry.with_reference(CpuPlatform().implementations())
    return [
        pytest.param(row.op, row.name, query, id=f"{row.op}-{row.name}-{i}")
        for op in CONTRACTS
        for row in registry.candidates(op)
        if row.name != REFERENCE
        for i, query in enumerate(queries(op))
    ]


@pytest.mark.parametrize(("op", "name", "query"), rows())
def test_agrees_with_the_reference(op, name, query, bind, runtime):
    try:
        candidate = bind(op, query, name)
    except SelectionError as error:
        pytest.skip(str(error))
    truth = bind(op, query, REFERENCE)
    result = compare(CONTRACTS[op], query, candidate, truth, runtime.device, seed=3)
    assert result.within, f"{query}: {result.case}, largest error {result.largest}"


def test_every_op_has_queries_and_a_reference(registry):
    assert set(registry.ops()) == set(CONTRACTS)
    for op in CONTRACTS:
        assert queries(op), op
        assert REFERENCE in [row.name for row in registry.candidates(op)]


def test_a_wrong_implementation_is_found(runtime):
    """The comparison itself can fail: in value, in shape, in dtype, by NaN."""
    contract, query = CONTRACTS["silu_and_mul"], ActivationQuery(8, "float32")

    def right(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x[:, :8]) * x[:, 8:]

    for wrong in (
        lambda x: right(x) + 1e-3,
        lambda x: right(x).double(),
        lambda x: right(x).masked_fill(x[:, :8] > 1, torch.nan),
        lambda x: right(x)[:1],
    ):
        assert not compare(contract, query, wrong, right, runtime.device).within
    assert compare(contract, query, right, right, runtime.device).within
