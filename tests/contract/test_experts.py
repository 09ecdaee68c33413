"""Mixture of experts beyond the generated cases: independent truths, stored blocks, tokens alone and in a crowd."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch

from headrace.platforms.queries import ExpertsQuery
from headrace.platforms.reference.checks.experts import CHECKS
from headrace.platforms.reference.experts import ReferenceExperts, topk_softmax
from headrace.platforms.registry import SelectionError

E, K, H, INNER = 6, 3, 64, 96


def query(scheme: str = "", down_scheme: str = "", dtype: str = "float32") -> ExpertsQuery:
    return ExpertsQuery(E, K, H, INNER, dtype, scheme, down_scheme)


def drawn(tokens: int) -> tuple[torch.Tensor, ...]:
    """w13, w2, x, weights, ids."""
    torch.manual_seed(tokens)
    w13, w2 = torch.randn(E, 2 * INNER, H) / H**0.5, torch.randn(E, H, INNER) / INNER**0.5
    ids = torch.rand(tokens, E).argsort(1)[:, :K].int()
    return w13, w2, torch.randn(tokens, H), torch.rand(tokens, K), ids


@pytest.mark.parametrize("renormalize", [True, False])
def test_topk_softmax_by_brute_force(renormalize: bool) -> None:
    rows = [[0.5, 2.0, 2.0, -1.0, 2.0], [0.0] * 5, [-math.inf, 3.0, -math.inf, 1.0, 1.0]]
    weights, ids = topk_softmax(torch.tensor(rows), 2, renormalize)
    assert ids.dtype == torch.int32 and ids.tolist() == [[1, 2], [0, 1], [1, 3]]
    for row, got, chosen in zip(rows, weights.tolist(), ids.tolist(), strict=True):
        mass = [math.exp(value) for value in row]
        total = sum(mass[i] for i in chosen) if renormalize else sum(mass)
        assert got == pytest.approx([mass[i] / total for i in chosen])


def test_rows_with_nan_still_choose_experts() -> None:
    logits = torch.full((2, 8), torch.nan)
    logits[1, 3] = 1.0
    _, ids = topk_softmax(logits, 4, True)
    assert all(len(set(row)) == 4 and 0 <= min(row) <= max(row) < 8 for row in ids.tolist())


def test_reference_experts_token_by_token(runtime) -> None:
    w13, w2, x, weights, ids = drawn(4)
    op = ReferenceExperts(query(), runtime)
    got = op(x, weights, ids, op.pack(w13, w2))
    for t in range(4):
        want = torch.zeros(H)
        for k in range(K):
            expert = int(ids[t, k])
            gate, up = w13[expert, :INNER] @ x[t], w13[expert, INNER:] @ x[t]
            want += weights[t, k] * (w2[expert] @ (gate * torch.sigmoid(gate) * up))
        torch.testing.assert_close(got[t], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["native", "torch", "reference"])
@pytest.mark.parametrize("check", CHECKS)
def test_check(maker, name: str, check: str) -> None:
    try:
        CHECKS[check](maker("fused_experts", name), "float32")
    except SelectionError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("scheme", "down_scheme"),
    [("Q8_0", "Q8_0"), ("Q4_0", "Q4_0"), ("Q4_1", "Q5_1"), ("Q5_0", ""), ("", "Q8_0")],
)
def test_native_experts_on_stored_blocks(bind, runtime, scheme, down_scheme, dtype) -> None:
    """Each expert's blocks, asked for one by one, against the reference on what they stand for."""
    try:
        op = bind("fused_experts", query(scheme, down_scheme, dtype), "native")
    except SelectionError as error:
        pytest.skip(str(error))
    w13, w2, x, weights, ids = drawn(33)
    truth = ReferenceExperts(query(), runtime)
    stored13, plain13 = as_stored(w13, scheme, dtype)
    stored2, plain2 = as_stored(w2, down_scheme, dtype)
    x = x.to(getattr(torch, dtype))
    want = truth(x.float(), weights, ids, truth.pack(plain13, plain2))
    packed = op.pack(stored13, stored2)
    for tokens in (1, 3, 33):
        got = op(x[:tokens], weights[:tokens], ids[:tokens], packed)
        assert got.dtype == x.dtype
        error = (got.float() - want[:tokens]).abs()
        # activations are rounded to 8 bits twice: about half a percent each time
        assert error.mean() < 0.02 * want.std() and error.max() < 0.12 * want.std()


def as_stored(weight: torch.Tensor, scheme: str, dtype: str) -> tuple[object, torch.Tensor]:
    """What `pack` takes, and the values it holds."""
    if not scheme:
        plain = weight.to(getattr(torch, dtype))
        return plain, plain.float()
    kind = gguf.GGMLQuantizationType[scheme]
    blocks = [gguf.quants.quantize(matrix.numpy(), kind) for matrix in weight]
    values = np.stack([gguf.quants.dequantize(raw, kind) for raw in blocks])
    return blocks, torch.from_numpy(values)
