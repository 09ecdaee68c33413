"""FlashInfer and FlashAttention behind the contract of paged attention, without a device and without the packages:
every call is bound to the real packages' signatures, and stand-ins that compute as the reference does give the results.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace.platforms.cuda.platform import CudaPlatform
from headrace.platforms.graph import GraphSupport
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.queries import AttentionQuery
from headrace.platforms.reference.attention import ReferenceAttention
from headrace.platforms.reference.cases import Requests, make_batch, make_caches, scattered_blocks
from headrace.platforms.reference.checks.attention import CHECKS
from headrace.platforms.reference.compare import compare
from headrace.platforms.registry import Registry
from tests.platforms.cuda import fake_attention
from tests.platforms.cuda.fake_attention import CPU, Static

LIBRARIES = ("flashinfer", "flash_attention_3", "flash_attention_2")
# where what they call is defined, and how much that is
PLACES = {
    "flashinfer": ("flashinfer/", 8),
    "flash_attention_3": ("hopper/", 1),
    "flash_attention_2": ("flash_attn/", 2),
}
MODULES = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}


def attention(*shape: int, dtype: str = "bfloat16", **options: Any) -> AttentionQuery:
    heads, kv_heads, size = shape
    wide, kv = options.pop("v_head_dim", size), options.pop("kv", dtype)
    return AttentionQuery(heads, kv_heads, size, wide, dtype, kv, size**-0.5, **options)


@pytest.fixture
def calls(monkeypatch):
    counter = fake_attention.install(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products: threads would only wait for each other
    yield counter
    torch.set_num_threads(threads)
    fake_attention.forget()


def make(name: str, query: Any, arch: str = "sm_90") -> Any:
    registry = Registry.with_reference(CudaPlatform().implementations())
    row = next(row for row in registry.candidates("paged_attention") if row.name == name)
    runtime = fake_attention.runtime(arch)
    assert row.supports(query, runtime.info).status == "unverified"
    return row.load()(query, runtime)


QUERIES = [
    attention(6, 2, 64),
    attention(8, 8, 64, dtype="float16", window=20, softcap=5.0),
    attention(4, 1, 64, window=7),
]


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.dtype} {query.window}")
def test_contract(calls, name, query):
    reference = ReferenceAttention(query, fake_attention.runtime())
    result = compare(
        CONTRACTS["paged_attention"], query, make(name, query, "sm_90"), reference, CPU
    )
    assert result.within, result
    folder, places = PLACES[name]
    assert len(calls) == places and all(place.startswith(folder) for place in calls)


def test_flashinfer_reads_keys_and_values_in_fp8(calls):
    query = attention(6, 2, 64, kv="fp8_e4m3")
    reference = ReferenceAttention(query, fake_attention.runtime())
    ours = make("flashinfer", query, "sm_100")
    result = compare(CONTRACTS["paged_attention"], query, ours, reference, CPU)
    assert result.within, result


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize(
    "check",
    [
        "the result goes where it is asked to",
        "skipped slots are not written",
        "formats are in order",
    ],
)
def test_checks(calls, name, check):
    CHECKS[check](lambda query: make(name, query), "bfloat16")


@pytest.mark.parametrize("name", LIBRARIES)
def test_decodes_are_replayed_for_other_lengths(calls, name):
    """Fixed addresses, and sizes that do not depend on the lengths a graph was captured with."""
    op = make(name, attention(4, 2, 64))
    assert op.graph == GraphSupport.DECODE_ONE and not op.reads_tables
    size = type(op).kv_formats(op.query)[0].preferred_block_size
    lengths = ((2 * size + 9, 1), (9, 1)), ((3, 1), (size + 8, 1))
    table = scattered_blocks(Requests(((3 * size, 1), (3 * size, 1)), padding=2), size, 0)
    caches = make_caches(op, size, 1 + int(table.max()), CPU)
    for cache in caches:
        cache.normal_()
    q, static, seen, results = torch.randn(4, 4, 64).bfloat16(), Static(), [], []
    for these in lengths:
        batch = make_batch(Requests(these, padding=2), table, size, CPU)
        fresh = op.attend(q, *caches, op.plan(batch, 0))
        plan = op.plan(batch, 0, static)
        seen.append((plan.num_tokens, plan.longest_query, plan.singles, plan.table.shape))
        seen[-1] += tuple(one.data_ptr() for one in static.tensors.values())
        torch.testing.assert_close(op.attend(q, *caches, plan), fresh)
        results.append(fresh)
    assert seen[0] == seen[1] and not torch.equal(*results)


def test_steps_of_flashinfer_keep_apart(calls):
    """Groups have plans of their own; of one group the last plan serves, and an older one is refused."""
    op = make("flashinfer", attention(4, 2, 64))
    table = scattered_blocks(Requests(((40, 1), (50, 8))), 16, 0)
    caches = make_caches(op, 16, 1 + int(table.max()), CPU)
    for cache in caches:
        cache.normal_()
    batch = make_batch(Requests(((40, 1), (50, 8))), table, 16, CPU)
    batch.block_tables *= 2
    batch.slot_mappings *= 2
    batch.block_tables_host = [table, table]
    q = torch.randn(9, 4, 64).bfloat16()
    first, second = op.plan(batch, 0), op.plan(batch, 1)
    results = [op.attend(q, *caches, plan) for plan in (first, second, first)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    op.plan(make_batch(Requests(((7, 1),)), table[:1], 16, CPU), 0)
    with pytest.raises(RuntimeError, match="overwritten by a later one; plan again"):
        op.attend(q, *caches, first)
    op.attend(q, *caches, second)


def test_instances_share_a_workspace(calls):
    one, other = (make("flashinfer", attention(4, 2, 64, window=w)) for w in (0, 9))
    assert one._workspace is other._workspace
    module = importlib.import_module("headrace.platforms.cuda.flashinfer")
    del one, other
    assert not len(module._workspaces)


@pytest.mark.parametrize(("arch", "backend"), [("sm_90", "auto"), ("sm_80", "fa2")])
def test_flashinfer_s_kernels_for_prompts(calls, arch, backend):
    assert make("flashinfer", attention(4, 2, 64), arch)._wrapper(0, False).call._init == {
        "backend": backend
    }


def test_a_call_that_a_package_would_refuse_is_refused(calls):
    call = sys.modules["flash_attn_interface"].flash_attn_with_kvcache
    with pytest.raises(TypeError, match="unexpected keyword argument 'block_table'"):
        call(torch.zeros(1), torch.zeros(1), torch.zeros(1), block_table=None)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_package_that_cannot_be_imported_is_the_reason(calls, monkeypatch, name):
    """Whatever its import throws: the selection goes on to the next implementation."""
    module = MODULES.get(name, name)
    monkeypatch.setitem(sys.modules, module, ModuleType(module))  # without what is asked of it
    with pytest.raises(ImportError, match=rf"{module} cannot be imported \(AttributeError"):
        make(name, attention(4, 2, 64))


def test_verdicts():
    rows = {row.name: row for row in CudaPlatform().implementations()}

    def reasons(name: str, query: Any, arch: str = "sm_90") -> str:
        verdict = rows[name].supports(query, CudaPlatform.describe(arch))
        return f"{verdict.status}: {'; '.join(verdict.reasons)}"

    plain = attention(32, 8, 128)
    shared = next(
        row
        for row in CudaPlatform().implementations()
        if row.name == "triton" and row.op == "paged_attention"
    )
    for name in LIBRARIES:
        assert rows[name].rank < shared.rank
        assert reasons(name, plain).startswith("unverified: the project has not run it")
        for query, why in (
            (attention(32, 8, 128, dtype="float32"), "dtype float32"),
            (attention(32, 8, 64, sinks=True), "no sinks"),
            (attention(16, 1, 576, v_head_dim=512, latent=True), "no latent cache"),
            (attention(8, 8, 64, v_head_dim=32), "values of 32"),
            (attention(8, 8, 512), "heads of 512"),
            (attention(32, 8, 128, kv="int8"), "KV in int8"),
            (attention(10, 4, 64), "no multiple of 4"),
        ):
            found = reasons(name, query)
            assert found.startswith("no: ") and why in found, (name, found)
        assert "older than sm_80" in reasons(name, plain, "sm_75")
    assert "nvcc and ninja" in reasons("flashinfer", plain)
    eight = attention(32, 8, 128, kv="fp8_e4m3")
    assert "does not convert fp8_e4m3" in reasons("flashinfer", eight, "sm_80")
    assert reasons("flashinfer", eight, "sm_89").startswith("unverified")
    assert "heads of 80" in reasons("flashinfer", attention(32, 32, 80))
    assert "KV in fp8_e4m3" in reasons("flash_attention_2", attention(8, 8, 64, kv="fp8_e4m3"))
    assert "is not sm_90" in reasons("flash_attention_3", plain, "sm_100")
