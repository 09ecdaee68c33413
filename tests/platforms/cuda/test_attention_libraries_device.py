"""FlashInfer and FlashAttention on the device: skipped where a package is not installed."""

from __future__ import annotations

import pytest

from headrace.platforms.cuda.platform import CudaPlatform
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.queries import AttentionQuery
from headrace.platforms.reference.checks.attention import CHECKS
from headrace.platforms.reference.checks.base import NothingToCheck
from headrace.platforms.reference.compare import compare
from headrace.platforms.registry import Implementation, installed_version, unmet

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]  # FlashInfer compiles its kernels

LIBRARIES = ("flashinfer", "flash_attention_3", "flash_attention_2")
QUERIES = [
    AttentionQuery(32, 8, 128, 128, "bfloat16", "bfloat16", 128**-0.5),
    AttentionQuery(6, 2, 64, 64, "float16", "float16", 0.125),
    AttentionQuery(8, 4, 256, 256, "bfloat16", "bfloat16", 0.0625, window=20, softcap=50.0),
    AttentionQuery(32, 8, 128, 128, "bfloat16", "fp8_e4m3", 128**-0.5),
]


@pytest.fixture(params=LIBRARIES)
def library(request, runtime) -> str:
    row = _row(request.param)
    missing = [text for need in row.requires if (text := unmet(need, installed_version))]
    if missing:
        pytest.skip("; ".join(missing))
    return row.name


def _row(name: str) -> Implementation:
    return next(row for row in CudaPlatform().implementations() if row.name == name)


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.dtype} {query.head_dim}")
def test_contract(make, runtime, library, query):
    verdict = _row(library).supports(query, runtime.info)
    if verdict.status == "no":
        pytest.skip("; ".join(verdict.reasons))
    ours, reference = (make("paged_attention", name, query) for name in (library, "reference"))
    result = compare(CONTRACTS["paged_attention"], query, ours, reference, runtime.device)
    assert result.within, result


@pytest.mark.parametrize("check", CHECKS)
def test_checks(make, library, check):
    if "latent" in check:
        pytest.skip("libraries read no latent cache")
    try:
        CHECKS[check](lambda query: make("paged_attention", library, query), "bfloat16")
    except NothingToCheck as reason:
        pytest.skip(str(reason))
