"""Every GGUF block type on every build of the native kernels against the gguf package's dequantization."""

from __future__ import annotations

import pytest
import torch

from headrace.platforms.ops import CONTRACTS, Ops
from headrace.platforms.queries import EmbeddingQuery, LinearQuery
from headrace.platforms.reference.compare import compare, truth_query
from headrace.platforms.reference.queries import queries
from headrace.platforms.registry import REFERENCE, Policy, SelectionError
from tests.contract.native_builds import TYPES, blocks, open_build, runnable, values

# Activations are rounded to 8 bits, a scale for each 32 of them. With a block's largest near 2.2 standard deviations
# the step is 0.017 of one, and the error of a sum 0.005 of rms(x) * |w|: six times that is allowed.
ACTIVATIONS = 0.03
# Beyond that rounding, as the root of the mean square: float32 sums, scales of the K types rounded to fp16, ties of the
# rounding to 8 bits that fall to the other side; or (tile unit) weights rounded to bfloat16.
KERNEL = {"rows": 2e-3, "tiles": 4e-3}
ROWS = (1, 3, 5, 9, 40, 77)
FEW = 4  # native/quant.h, kFineRows
WIDTH, FEATURES = 512, 50
NATIVE = ("linear", "embedding", "rms_norm", "fused_add_rms_norm", "rotary_embedding", "silu_and_mul",
          "gelu_and_mul", "gelu_tanh_and_mul", "paged_attention", "sample", "logprobs", "topk_softmax",
          "fused_experts")  # fmt: skip


@pytest.fixture(
    scope="module",
    params=runnable() or [pytest.param("", marks=pytest.mark.skip("no build is here"))],
)
def native(request):
    """bind(op, query) on the native implementation of one build."""
    runtime = open_build(request.param)
    kernels = runtime.kernels()
    assert kernels.isa == {"neon_dot": "neon"}.get(request.param, request.param)
    registry = open_registry()
    yield lambda op, query, name="native": Ops(
        registry, runtime.info, runtime, Policy(force={op: name})
    ).bind(op, query)
    runtime.close()


def open_registry():
    from headrace.platforms.cpu.platform import CpuPlatform
    from headrace.platforms.registry import Registry

    return Registry.with_reference(CpuPlatform().implementations())


def rounded_to_8_bits(x: torch.Tensor) -> torch.Tensor:
    groups = x.float().view(-1, 32)
    largest = groups.abs().amax(1, keepdim=True)
    return (
        (groups * torch.full_like(largest, 127).div(largest)).round().double() * (largest / 127)
    ).view(x.shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", TYPES)
def test_linear(native, kind, dtype):
    raw = blocks(kind, FEATURES, WIDTH)
    weight = values(kind, raw).double()
    op = native("linear", LinearQuery(WIDTH, FEATURES, dtype, kind, out_dtype="float32"))
    packed = op.pack(raw, None)
    generator = torch.Generator().manual_seed(1)
    for rows in ROWS:
        x = torch.randn(rows, WIDTH, generator=generator).to(getattr(torch, dtype))
        y = op(x, packed).double()
        assert y.shape == (rows, FEATURES)
        size = x.double().pow(2).mean(1).sqrt().unsqueeze(1) * weight.norm(dim=1)
        exact = (y - x.double() @ weight.T).abs() / size
        assert exact.max() <= ACTIVATIONS, (rows, float(exact.max()))
        if rows <= FEW:  # what the rounding left over is multiplied too
            assert spread(exact) <= 5e-4, (rows, spread(exact))
        else:
            # tighter: either the activations were rounded as above, or not at all (bfloat16 tiles)
            same = (y - rounded_to_8_bits(x) @ weight.T) / size
            errors = {"rows": spread(same), "tiles": spread(exact)}
            assert any(errors[way] <= KERNEL[way] for way in KERNEL), (rows, errors)


@pytest.mark.parametrize("kind", TYPES)
def test_prompts_in_pieces(native, kind):
    """What a token of a prompt becomes is the same however the prompt is cut."""
    raw = blocks(kind, FEATURES, WIDTH)
    op = native("linear", LinearQuery(WIDTH, FEATURES, "float32", kind))
    packed = op.pack(raw, None)
    x = torch.randn(150, WIDTH, generator=torch.Generator().manual_seed(2))
    whole = op(x, packed)
    pieces = [(0, 5), (0, 149), (7, 20), (100, 150), (60, 66)]
    # with AMX tiles from 5 rows on and both terms below: off by 0.002 from each other
    if op.runtime.kernels().isa != "amx":
        pieces += [(0, 1), (3, 5), (11, 14), (146, 150)]
    for first, last in pieces:
        torch.testing.assert_close(op(x[first:last], packed), whole[first:last], rtol=0, atol=0)


def spread(errors: torch.Tensor) -> float:
    return float(errors.pow(2).mean().sqrt())


@pytest.mark.parametrize("kind", TYPES)
def test_linear_with_bias_into_a_view(native, kind):
    raw = blocks(kind, 20, 256, seed=3)
    bias = torch.linspace(-5, 5, 20)
    op = native("linear", LinearQuery(256, 20, "float32", kind, bias=True))
    plain = native("linear", LinearQuery(256, 20, "float32", kind))
    x = torch.randn(6, 300, generator=torch.Generator().manual_seed(2))[:, 7:263]
    wide = torch.full((6, 40), 7.0)
    op(x, op.pack(raw, bias), wide[:, 10:30])
    want = plain(x.contiguous(), plain.pack(raw, None)) + bias
    assert torch.allclose(wide[:, 10:30], want, rtol=1e-5, atol=1e-4)
    assert (wide[:, :10] == 7).all() and (wide[:, 30:] == 7).all()


@pytest.mark.parametrize("kind", TYPES)
def test_zero_and_huge_rows(native, kind):
    """A row of zeros has no scale; one of large values must not overflow the integers."""
    raw = blocks(kind, 16, 256, seed=4)
    weight = values(kind, raw)
    op = native("linear", LinearQuery(256, 16, "float32", kind))
    x = torch.zeros(2, 256)
    x[1] = torch.where(torch.arange(256) % 2 == 0, 1e6, -1e6)
    y = op(x, op.pack(raw, None))
    assert (y[0] == 0).all()
    want = x[1] @ weight.T
    assert ((y[1] - want).abs() <= 2e-3 * 1e6 * weight.norm(dim=1)).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q6_K"])
def test_what_is_not_finite_spoils_its_row_only(native, kind, bad):
    """Integers have no NaN: the scale of the activations carries it."""
    op = native("linear", LinearQuery(256, 16, "float32", kind))
    packed = op.pack(blocks(kind, 16, 256, seed=4), None)
    for rows in (1, 3, 9):
        x = torch.ones(rows, 256)
        x[rows - 1, 40] = bad
        y = op(x, packed)
        assert y[: rows - 1].isfinite().all() and not y[rows - 1].isfinite().any()


@pytest.mark.parametrize("scale", [1.0, 24.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", TYPES)
def test_embedding(native, kind, dtype, scale):
    raw = blocks(kind, 50, 256, seed=5)
    table = values(kind, raw)
    op = native("embedding", EmbeddingQuery(50, 256, dtype, kind, scale))
    ids = torch.tensor([0, 49, 17, 16, 15, 33, 17])
    got = op(ids, op.pack(raw))
    assert got.dtype == getattr(torch, dtype)
    want = table[ids] * scale
    if not kind.endswith("_K"):  # their scales are fp16 already
        assert torch.equal(got, want.to(got.dtype))
        return
    # products of two scales are rounded to fp16: scale * integer and minimum, each within the block's range
    within = 3 * 2**-11 * want.abs().amax(1, keepdim=True)
    within = within + {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11}[dtype] * want.abs()
    assert ((got.float() - want).abs() <= within).all()


@pytest.mark.parametrize("op", NATIVE)
def test_contracts(native, op):
    """The generated inputs of the op's contract, on this build."""
    served = 0
    for query in queries(op):
        try:
            candidate = native(op, query)
        except SelectionError:
            continue
        served += 1
        device = torch.device("cpu")
        truth = native(op, truth_query(CONTRACTS[op], query), REFERENCE)
        result = compare(CONTRACTS[op], query, candidate, truth, device, 5)
        assert result.within, f"{query}: {result.case}, largest error {result.largest}"
    assert served
