"""The implementations over Intel's extension for PyTorch against the reference, with the extension made up: what its
kernels for GPUs check and compute. The real package's kernels for CPUs: prove.py."""

from __future__ import annotations

import dataclasses
import importlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from headrace.platforms.ops import CONTRACTS
from headrace.platforms.queries import (
    AttentionQuery,
    ExpertsQuery,
    LinearQuery,
    NormQuery,
    RotaryQuery,
)
from headrace.platforms.reference.compare import compare
from headrace.platforms.registry import Registry, SelectionError, select
from headrace.platforms.xpu.platform import XpuPlatform
from tests.platforms.xpu import extension

DEVICE = torch.device("cpu")


def attention(q_heads, kv_heads, size, dtype, **options):
    return AttentionQuery(q_heads, kv_heads, size, size, dtype, dtype, size**-0.5, **options)


@pytest.fixture
def make(monkeypatch):
    """make(op, name, query): bound as the engine binds it, after its verdict on a described device."""
    extension.install(monkeypatch)
    registry = Registry.with_reference(XpuPlatform().implementations())
    runtime = SimpleNamespace(
        device=DEVICE, pinned_empty=lambda shape, dtype: torch.empty(shape, dtype=dtype)
    )

    def make(op, name, query):
        row = next(row for row in registry.candidates(op) if row.name == name)
        if name == "ipex":
            assert row.supports(query, XpuPlatform.describe("bmg")).status == "unverified"
        target = row.load()
        made = CONTRACTS[op].kind == "class" or row.per_query
        return target(query, runtime) if made else target

    return make


@pytest.mark.parametrize(
    ("op", "query"),
    [
        ("paged_attention", attention(4, 2, 64, "bfloat16")),
        ("paged_attention", attention(4, 1, 128, "float16", window=20)),
        ("paged_attention", attention(2, 2, 64, "float16", softcap=5.0)),
        ("rms_norm", NormQuery(96, "bfloat16")),
        ("rms_norm", NormQuery(96, "float32")),
        ("fused_add_rms_norm", NormQuery(96, "float16")),
        ("rotary_embedding", RotaryQuery(64, 64, "float32")),
        ("rotary_embedding", RotaryQuery(64, 64, "bfloat16")),
        ("fused_experts", ExpertsQuery(8, 2, 32, 32, "bfloat16")),
        ("fused_experts", ExpertsQuery(8, 4, 32, 32, "float16")),
    ],
    ids=lambda value: str(value)[:60],
)
def test_contract(make, op, query):
    result = compare(
        CONTRACTS[op], query, make(op, "ipex", query), make(op, "reference", query), DEVICE
    )
    assert result.within, result


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
def test_q4_0(make, dtype, bias):
    """Blocks as a GGUF file has them: a float16 scale, then numbers 0-15 in the low halves, 16-31 in the high ones."""
    rows, width, draw = 16, 64, torch.Generator().manual_seed(3)
    scales = (torch.rand(rows, width // 32, 1, generator=draw) + 0.1).half()
    numbers = torch.randint(16, (rows, width // 32, 32), generator=draw, dtype=torch.uint8)
    packed = numbers[..., :16] | numbers[..., 16:] << 4
    blocks = torch.cat((scales.view(torch.uint8), packed), -1).flatten(1)
    weight = ((numbers.float() - 8) * scales.float()).flatten(1)
    op = make("linear", "ipex", LinearQuery(width, rows, dtype, scheme="Q4_0", bias=bias))
    added = torch.randn(rows, generator=draw) if bias else None
    x = torch.randn(3, width, generator=draw).to(getattr(torch, dtype))
    got = op(x, op.pack(blocks.numpy(), added))
    want = torch.nn.functional.linear(x.float(), weight, added)
    relative, absolute = CONTRACTS["linear"].tolerance[dtype]
    assert got.dtype == x.dtype
    torch.testing.assert_close(got.float(), want, rtol=relative, atol=absolute * 8)


def test_a_build_for_cpus_is_refused():
    here = {"torch": "2.8.0+cpu", "intel-extension-for-pytorch": "2.8.0", "triton": "3.4.0"}
    device = dataclasses.replace(XpuPlatform.describe("bmg"), versions=here)
    row = next(row for row in XpuPlatform().implementations() if row.name == "ipex")
    verdict = row.supports(attention(4, 2, 64, "bfloat16"), device)
    assert verdict.status == "no" and "build for CPUs" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("op", "query", "arch", "why"),
    [
        ("paged_attention", attention(4, 2, 64, "float16"), "dg2", "two-dimensional block loads"),
        ("paged_attention", attention(4, 2, 64, "float32"), "bmg", "float32 not in"),
        ("paged_attention", attention(4, 2, 80, "float16"), "pvc", "no multiple of 64"),
        ("paged_attention", attention(4, 2, 512, "float16"), "pvc", "exceed 256"),
        ("paged_attention", attention(4, 2, 64, "float16", sinks=True), "pvc", "sinks"),
        ("fused_experts", ExpertsQuery(128, 8, 64, 32, "float16"), "bmg", "128 experts"),
        ("fused_experts", ExpertsQuery(8, 3, 64, 32, "float16"), "bmg", "3 of them"),
        ("linear", LinearQuery(64, 64, "float16", "Q4_K"), "bmg", "only Q4_0"),
        ("linear", LinearQuery(64, 60, "float16", "Q4_0"), "bmg", "60 outputs"),
        ("rotary_embedding", RotaryQuery(64, 32, "float16"), "bmg", "whole heads only"),
        ("rms_norm", NormQuery(64, "bfloat16"), "mtl", "no bfloat16"),
    ],
)
def test_what_the_extension_cannot_do_is_said(op, query, arch, why):
    rows = (row for row in XpuPlatform().implementations() if (row.op, row.name) == (op, "ipex"))
    verdict = next(rows).supports(query, XpuPlatform.describe(arch))
    assert verdict.status == "no" and why in "; ".join(verdict.reasons)


def test_the_extension_is_asked_for_its_own_release_of_torch():
    """It ends the process when it is imported beside another one."""
    row = next(row for row in XpuPlatform().implementations() if row.name == "ipex")
    assert {need.distribution: need.specifier for need in row.requires} == {
        "intel-extension-for-pytorch": ">=2.8,<2.9",
        "torch": "==2.8.*",
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_blocks_pass_the_self_test_of_a_start(make, dtype, monkeypatch):
    """The reference has no block types: it is given the same weights plain. A wrong order of bytes does not pass."""
    from headrace.platforms.ops import Ops

    registry = Registry.with_reference(XpuPlatform().implementations())
    versions = {"torch": "2.8.0+xpu", "intel-extension-for-pytorch": "2.8.10+xpu"}
    monkeypatch.setattr("headrace.platforms.ops.select", partial(select, versions=versions.get))
    runtime = SimpleNamespace(device=DEVICE, tuned={})
    query = LinearQuery(4096, 256, dtype, scheme="Q4_0")
    ops = Ops(registry, XpuPlatform.describe("bmg"), runtime)
    ops.bind("linear", query)
    (decision,) = ops.report.decisions
    assert decision.chosen == "ipex"
    row = next(row for row in decision.candidates if row.name == "ipex")
    assert "self-test passed" in row.reasons[-1]
    ipex_ops = importlib.import_module("headrace.platforms.xpu.ipex_ops")
    right = ipex_ops.unpack_q4_0
    monkeypatch.setattr(
        ipex_ops, "unpack_q4_0", lambda rows: (right(rows)[0].flip(1), right(rows)[1])
    )
    with pytest.raises(SelectionError, match="self-test failed"):
        Ops(registry, XpuPlatform.describe("bmg"), runtime).bind("linear", query)
