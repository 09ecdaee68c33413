"""The tile unit's kernels: the AMX build, and on CPUs that have no tiles the same with each of their instructions in
plain C++."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
import torch

from headrace.platforms.cpu import kernels as native_kernels
from headrace.platforms.cpu.builds import BUILDS
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.ops import CONTRACTS, Ops
from headrace.platforms.queries import LinearQuery
from headrace.platforms.reference.compare import compare, truth_query
from headrace.platforms.reference.queries import queries
from headrace.platforms.registry import REFERENCE, Policy, SelectionError
from tests.contract.native_builds import TYPES, blocks, open_build, runnable, values
from tests.contract.native_fuzz import COMMON, FLAGS, LIBRARY
from tests.contract.test_native_blocks import open_registry

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
REAL = pytest.mark.skipif(
    "amx" not in runnable(), reason="this CPU has no tiles, or the build is missing"
)
EMULATED = pytest.mark.skipif(
    not BUILDS["avx512_bf16"] <= CpuPlatform.probe()[0].features or not COMPILER,
    reason="the build needs AVX-512 with bf16 beside its tiles, and a C++ compiler",
)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """bind(op, query) on the AMX build with emulated tiles."""
    library = tmp_path_factory.mktemp("tiles") / "_native_amx_emulated.so"
    command = [COMPILER, *COMMON, *FLAGS["amx_emulated"], "-O1", "-g0"]
    subprocess.run([*command, "-shared", "-fPIC", LIBRARY, "-o", library], check=True)
    yield from opened("avx512_bf16", library)


@pytest.fixture(scope="module")
def real():
    yield from opened("amx", None)


def opened(build, library):
    runtime = open_build(build)
    with pytest.MonkeyPatch.context() as patch:
        if library:
            patch.setattr(native_kernels, "native_build", lambda features: library)
        assert runtime.kernels().isa == "amx"
    registry = open_registry()
    yield lambda op, query, name="native": Ops(
        registry, runtime.info, runtime, Policy(force={op: name})
    ).bind(op, query)
    runtime.close()


@pytest.fixture(
    scope="module",
    params=[pytest.param("real", marks=REAL), pytest.param("emulated", marks=EMULATED)],
)
def native(request):
    return request.getfixturevalue(request.param)


# rows: one tile and less, one pair of tiles and more, blocks of rows; columns: parts of a panel, of a pair of panels
# and of a chunk's; inputs: less than a depth, several of which the last is short, more than stay near
SHAPES = (
    (5, 32, 3), (16, 512, 16), (17, 544, 17), (32, 1056, 100), (33, 96, 32), (40, 1088, 50), (77, 544, 130),
    (512, 64, 48), (545, 576, 33), (1030, 32, 20), (300, 2592, 290),
)  # fmt: skip


@pytest.mark.parametrize("rows, k, n", SHAPES)
@pytest.mark.parametrize("out", ["float32", "bfloat16"])
def test_bfloat16(native, rows, k, n, out):
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, k + 24, generator=generator).bfloat16()
    x, weight = wide[:, 8 : k + 8], torch.randn(n, k, generator=generator).bfloat16()
    bias = torch.linspace(-2, 2, n)
    want = x.double() @ weight.double().T
    for given in (None, bias):
        op = native("linear", LinearQuery(k, n, "bfloat16", bias=given is not None, out_dtype=out))
        got = op(x, op.pack(weight, given))
        exact = want if given is None else want + bias.double()
        # sums in float32: of k products of about 1 each
        rounding = 2**-8 * exact.abs() if out == "bfloat16" else 0
        assert ((got.double() - exact).abs() <= k**0.5 * 1e-5 + rounding).all()


@pytest.mark.parametrize("kind", TYPES)
def test_blocks(native, kind):
    """Weights are what the blocks hold, rounded to bfloat16; nothing else is rounded but sums."""
    for rows, k, n in ((24, 768, 40), (70, 512, 130), (260, 2304, 70)):
        raw = blocks(kind, n, k, seed=rows)
        weight = values(kind, raw)
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).bfloat16()
        op = native("linear", LinearQuery(k, n, "bfloat16", kind, out_dtype="float32"))
        want = x.double() @ weight.bfloat16().double().T
        size = x.double().pow(2).mean(1).sqrt().unsqueeze(1) * weight.double().norm(dim=1)
        error = (op(x, op.pack(raw, None)).double() - want).abs() / size
        # scales of the K types are rounded to fp16 before: weights of a whole group may round to the other side
        assert error.max() <= (2e-2 if kind.endswith("_K") else 1e-4), (rows, float(error.max()))


@REAL
@EMULATED
@pytest.mark.parametrize("size", [1.0, 1e-19, 1e19])
def test_emulated_tiles_are_the_units(real, emulated, size):
    """To the last bit, denormal products and sums that overflow included."""
    query = LinearQuery(544, 40, "bfloat16", out_dtype="float32")
    generator = torch.Generator().manual_seed(3)
    x, weight = ((torch.randn(n, 544, generator=generator) * size).bfloat16() for n in (60, 40))
    both = [native("linear", query) for native in (real, emulated)]
    first, second = (op(x, op.pack(weight, None)) for op in both)
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["bfloat16", "Q8_0", "Q4_K"])
def test_prompts_in_pieces(native, kind):
    """What a token of a prompt becomes is the same however the prompt is cut, from the rows on that take tiles."""
    k, n = 1024, 50
    stored = torch.randn(n, k).bfloat16() if kind == "bfloat16" else blocks(kind, n, k)
    scheme = "" if kind == "bfloat16" else kind
    op = native("linear", LinearQuery(k, n, "bfloat16", scheme))
    packed = op.pack(stored, None)
    x = torch.randn(600, k, generator=torch.Generator().manual_seed(2)).bfloat16()
    whole = op(x, packed)
    for first, last in ((0, 5), (0, 599), (7, 20), (500, 600), (60, 95)):
        torch.testing.assert_close(op(x[first:last], packed), whole[first:last], rtol=0, atol=0)


@pytest.mark.parametrize("op", ["linear", "paged_attention", "fused_experts"])
def test_contracts(native, op):
    """The generated inputs of the op's contract in bfloat16, which is what tiles multiply; of attention's a part."""
    served = 0
    halves = [query for query in queries(op) if query.dtype == "bfloat16"]
    for query in halves[:: 5 if op == "paged_attention" else 1]:
        try:
            candidate = native(op, query)
        except SelectionError:
            continue
        served += 1
        truth = native(op, truth_query(CONTRACTS[op], query), REFERENCE)
        result = compare(CONTRACTS[op], query, candidate, truth, torch.device("cpu"), 5)
        assert result.within, f"{query}: {result.case}, largest error {result.largest}"
    assert served
