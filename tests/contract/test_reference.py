"""The reference against independent truths: formulas written another way, PyTorch's own modules, brute force."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.platforms.queries import AttentionQuery
from headrace.platforms.reference import ops
from headrace.platforms.reference.attention import ReferenceAttention
from headrace.platforms.reference.cases import Requests, make_batch, make_caches, scattered_blocks


def brute_force(q, keys, values, query, position, sinks):
    """One query of one head with plain loops in Python floats."""
    scores = []
    for j in range(len(keys)):
        if j > position or (query.window and j <= position - query.window):
            continue
        score = sum(a * b for a, b in zip(q, keys[j], strict=True)) * query.scale
        if query.softcap:
            score = query.softcap * math.tanh(score / query.softcap)
        scores.append((score, j))
    top = max(score for score, _ in scores)
    total = sum(math.exp(score - top) for score, _ in scores)
    if sinks is not None:
        total += math.exp(sinks - top)
    weights = [(math.exp(score - top) / total, j) for score, j in scores]
    return [sum(w * values[j][d] for w, j in weights) for d in range(query.v_head_dim)]


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(0, 0.0, False), (4, 0.0, False), (5, 3.0, True)]
)
def test_attention_by_brute_force(runtime, window, softcap, sinks):
    query = AttentionQuery(
        4, 2, 6, 6, "float32", "float32", 0.4, window=window, softcap=softcap, sinks=sinks
    )
    op = ReferenceAttention(query, runtime)
    total, new, size = 11, 4, 4
    requests = Requests(((total, new),))
    table = scattered_blocks(requests, size, 0)
    k_cache, v_cache = make_caches(op, size, 8, runtime.device)
    torch.manual_seed(0)
    k, v = torch.randn(2, total, 2, 6)
    q = torch.randn(new, 4, 6)
    sink = torch.randn(4)
    for part, start, stop in (
        (Requests(((total - new, total - new),)), 0, total - new),
        (requests, total - new, total),
    ):
        batch = make_batch(part, table, size, runtime.device)
        plan = op.plan(batch, 0)
        op.write(k[start:stop], v[start:stop], k_cache, v_cache, plan)
    got = op.attend(q, k_cache, v_cache, plan, sinks=sink if sinks else None)
    for i in range(new):
        for head in range(4):
            want = brute_force(
                q[i, head].tolist(),
                k[:, head // 2].tolist(),
                v[:, head // 2].tolist(),
                query,
                total - new + i,
                sink[head].item() if sinks else None,
            )
            torch.testing.assert_close(got[i, head], torch.tensor(want), rtol=1e-4, atol=1e-5)


def test_rms_norm_is_torch_s():
    x, weight = torch.randn(5, 64), torch.randn(64)
    module = torch.nn.RMSNorm(64, eps=1e-5)
    module.weight.data.copy_(weight)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), module(x).detach())


@pytest.mark.parametrize("is_neox", [True, False])
def test_rotary_is_a_complex_rotation(is_neox):
    width, rotary = 12, 8
    angles = torch.rand(20, rotary // 2) * 6
    x = torch.randn(3, 2, width)
    turned = x.clone()
    positions = torch.tensor([4, 0, 19])
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    ops.rotary_embedding(positions, turned, torch.zeros(3, 1, width), cos_sin, is_neox)
    pairs = x[..., :rotary]
    pairs = (
        pairs.unflatten(-1, (2, -1)).transpose(-1, -2) if is_neox else pairs.unflatten(-1, (-1, 2))
    )
    turn = torch.polar(torch.ones(3, 1, rotary // 2), angles[positions].unsqueeze(1))
    want = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    want = want.transpose(-1, -2).flatten(-2) if is_neox else want.flatten(-2)
    torch.testing.assert_close(turned[..., :rotary], want)
    assert torch.equal(turned[..., rotary:], x[..., rotary:])


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("silu_and_mul", torch.nn.SiLU()),
        ("gelu_and_mul", torch.nn.GELU()),
        ("gelu_tanh_and_mul", torch.nn.GELU(approximate="tanh")),
    ],
)
def test_gated_activations(name, module):
    x = torch.randn(4, 10)
    torch.testing.assert_close(getattr(ops, name)(x), module(x[:, :5]) * x[:, 5:])
