"""Every implementation against the reference, over CPU kernels of the documented semantics: it calls its ops rightly.

Whether the ops do on a device what their documentation says is not shown here: the start-up self-test and
`headrace conformance` on such a device show it.
"""

from __future__ import annotations

import pytest

from headrace.platforms.npu.platform import NpuPlatform
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.queries import AttentionQuery
from headrace.platforms.reference.compare import compare
from headrace.platforms.reference.queries import queries
from headrace.platforms.registry import REFERENCE

# collectives take a group of processes: tests/contract/test_collectives.py
ROWS = [(row.op, row.name) for row in NpuPlatform().implementations() if row.op != "collectives"]


@pytest.mark.parametrize(("op", "name"), ROWS)
def test_equals_the_reference(make, runtime, op, name):
    row = next(r for r in NpuPlatform().implementations() if (r.op, r.name) == (op, name))
    info = NpuPlatform.describe("310P") if op == "sample" else runtime.info
    served = [query for query in queries(op) if row.supports(query, info).status != "no"]
    if op == "rotary_embedding" and name == "apply_rotary":
        assert {query.head_dim for query in served} == {64}
    assert served, f"no query reaches {name}"
    for query in served:
        result = compare(
            CONTRACTS[op], query, make(op, name, query), make(op, REFERENCE, query), runtime.device
        )
        assert result.within, f"{query}: {result.case}, largest error {result.largest:.2g}"


@pytest.mark.parametrize("window", [0, 1, 2, 40, 129])
def test_windows_count_the_querys_own_key(make, runtime, window):
    query = AttentionQuery(4, 2, 32, 32, "float16", "float16", 0.2, window=window)
    result = compare(
        CONTRACTS["paged_attention"],
        query,
        make("paged_attention", "fia", query),
        make("paged_attention", REFERENCE, query),
        runtime.device,
    )
    assert result.within, f"{result.case}, largest error {result.largest:.2g}"


def test_a_cache_that_the_op_cannot_count_is_refused(make, runtime):
    import torch

    from headrace.platforms.npu.attention import flat

    cache = torch.empty(1 << 16, 8, 128, 128, device="meta")
    with pytest.raises(ValueError, match="--kv-cache-memory-bytes"):
        flat(cache)
