"""KV caches in another dtype than the activations: every pair of them against the reference, and what int8 costs."""

from __future__ import annotations

import pytest
import torch

from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.ops import CONTRACTS, Ops
from headrace.platforms.queries import AttentionQuery
from headrace.platforms.reference.attention import ReferenceAttention
from headrace.platforms.reference.cases import (
    Requests,
    _Draw,
    make_batch,
    make_caches,
    run_attention,
    scattered_blocks,
)
from headrace.platforms.reference.compare import compare
from headrace.platforms.reference.int8_rows import dequantize, quantize
from headrace.platforms.registry import REFERENCE, Policy, Registry, SelectionError
from tests.contract.native_builds import open_build, runnable

FLOATS = ("float32", "bfloat16", "float16")
KV = (*FLOATS, "int8")
SHAPES: tuple[tuple[tuple[int, int, int], dict], ...] = (
    ((9, 3, 64), {}),
    ((6, 2, 80), {"window": 17, "softcap": 20.0, "sinks": True}),
    ((8, 1, 128), {"window": 64}),
)
# int8 numbers are off by half a step at most: 1/254 of a row's largest, which for 64 normal numbers is near 2.5. So a
# score q.k / sqrt(D) of this test moves by 0.01 (root mean square, |q| = 2), a value by 0.006, an average less.
INT8_RMS = 0.01


def query(shape: tuple[int, int, int], dtype: str, kv: str, **options) -> AttentionQuery:
    heads, kv_heads, size = shape
    return AttentionQuery(heads, kv_heads, size, size, dtype, kv, size**-0.5, **options)


@pytest.fixture(scope="module", params=[*runnable(), "torch"])
def attention(request):
    """attention(query): the native implementation on one build, or PyTorch's operators."""
    name = request.param
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # see conftest.py
    runtime = open_build(name if name != "torch" else "portable")
    registry = Registry.with_reference(CpuPlatform().implementations())
    policy = Policy(force={"paged_attention": "torch" if name == "torch" else "native"})

    def make(asked: AttentionQuery):
        try:
            return Ops(registry, runtime.info, runtime, policy).bind("paged_attention", asked)
        except SelectionError as error:
            pytest.skip(str(error))

    make.strongest = name in ("torch", runnable()[0])
    yield make
    runtime.close()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_pair_of_dtypes(attention, dtype, kv):
    for shape, options in SHAPES if attention.strongest else SHAPES[1:2]:
        asked = query(shape, dtype, kv, **options)
        op = attention(asked)
        truth = ReferenceAttention(asked, op.runtime)
        result = compare(CONTRACTS["paged_attention"], asked, op, truth, torch.device("cpu"), 7)
        assert result.within, f"{asked}: {result.case}, largest error {result.largest}"


@pytest.mark.parametrize("size", [16, 48, 80, 96, 112, 160])
@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
def test_block_sizes_that_no_tile_divides(attention, kv, size):
    asked = query((4, 2, 64), "bfloat16", kv)
    op = attention(asked)
    truth = ReferenceAttention(asked, op.runtime)
    requests = Requests(((size + 3, 1), (3 * size - 1, 2 * size + 5), (200, 200)))
    got, want = (
        run_attention(each, _Draw(torch.device("cpu"), 2), requests, size) for each in (op, truth)
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_int8_against_float32(attention):
    """What is lost is what rounding to 8 bits loses, in a decode step and in a prompt."""
    requests = Requests(((300, 1), (40, 1), (65, 65)))
    op = attention(query((8, 2, 64), "float32", "int8"))
    exact = ReferenceAttention(query((8, 2, 64), "float32", "float32"), op.runtime)
    got, want = (
        run_attention(each, _Draw(torch.device("cpu"), 4), requests, 32) for each in (op, exact)
    )
    error = (got[0] - want[0]).pow(2).mean().sqrt()
    assert 0 < error <= INT8_RMS, float(error)


def test_int8_rows_of_the_reference():
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0)) * 10
    x[0, 0] = 0
    rows = quantize(x)
    assert rows.shape == (5, 3, 68) and rows.dtype == torch.int8
    step = x.abs().amax(-1, keepdim=True) / 127
    assert ((dequantize(rows) - x).abs() <= step / 2 * (1 + 1e-5)).all()
    assert (dequantize(rows)[0, 0] == 0).all()
    x[1, 1, 5] = torch.inf
    assert dequantize(quantize(x))[1, 1].isnan().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_that_is_not_finite_spoils_its_request_only(attention, dtype, bad):
    op = attention(query((4, 2, 64), dtype, "int8"))
    requests = Requests(((1, 1), (1, 1), (20, 20)))
    batch = make_batch(requests, scattered_blocks(requests, 16, 0), 16, torch.device("cpu"))
    caches = make_caches(op, 16, 8, torch.device("cpu"))
    q, k, v = (torch.randn(22, heads, 64).to(getattr(torch, dtype)) for heads in (4, 2, 2))
    k[1, 0, 3] = bad
    plan = op.plan(batch, 0)
    op.write(k, v, *caches, plan)
    out = op.attend(q, *caches, plan)
    assert out[1, :2].isnan().any()
    assert out[0].isfinite().all() and out[2:].isfinite().all()


def test_what_no_attention_can_do_is_said_in_a_line(runtime, registry):
    asked = query((4, 2, 64), "float32", "fp8_e4m3")
    with pytest.raises(SelectionError) as refused:
        Ops(registry, runtime.info, runtime).bind("paged_attention", asked)
    text = str(refused.value)
    assert "\n" not in text and "KV in fp8_e4m3 not in" in text and REFERENCE in text
