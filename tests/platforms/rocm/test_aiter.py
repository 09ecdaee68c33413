"""AITER behind the contracts, without a device and without AITER: every call is bound to the real package's
signatures (aiter_facts.json), and a stand-in that computes as the reference does gives the results."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.platforms.attention import PagedAttention
from headrace.platforms.graph import GraphSupport
from headrace.platforms.kv_layout import CANONICAL, KVFormat
from headrace.platforms.ops import CONTRACTS, Ops
from headrace.platforms.queries import (
    ActivationQuery,
    AttentionQuery,
    ExpertsQuery,
    LinearQuery,
    NormQuery,
    RouterQuery,
)
from headrace.platforms.reference.cases import Requests, make_batch, scattered_blocks
from headrace.platforms.reference.compare import compare
from headrace.platforms.registry import Registry
from headrace.platforms.rocm.aiter import rows, vendor
from headrace.platforms.rocm.platform import RocmPlatform, known
from tests.platforms.rocm import fake_aiter
from tests.platforms.rocm.aiter_facts import load

FACTS = load()
CPU = torch.device("cpu")
MI300 = RocmPlatform.describe("gfx942")


def attention(*shape: int, dtype: str, **options: Any) -> AttentionQuery:
    heads, kv_heads, size = shape
    wide, kv = options.pop("v_head_dim", size), options.pop("kv", dtype)
    return AttentionQuery(heads, kv_heads, size, wide, dtype, kv, size**-0.5, **options)


def latent(heads: int, dtype: str) -> AttentionQuery:
    return attention(heads, 1, 576, dtype=dtype, v_head_dim=512, latent=True)


def queries(dtype: str) -> list[tuple[str, Any]]:
    gated = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
    latents = [16] if dtype == "bfloat16" else []
    return [
        *(("paged_attention", latent(heads, dtype)) for heads in latents),
        ("rms_norm", NormQuery(96, dtype)),
        ("fused_add_rms_norm", NormQuery(96, dtype)),
        *((op, ActivationQuery(96, dtype)) for op in gated),
        ("linear", LinearQuery(96, 80, dtype)),
        ("linear", LinearQuery(64, 48, dtype, bias=True)),
        ("topk_softmax", RouterQuery(8, 2, True)),
        ("topk_softmax", RouterQuery(64, 6)),
        ("fused_experts", ExpertsQuery(8, 2, 128, 64, dtype)),
        ("fused_experts", ExpertsQuery(4, 3, 128, 96, dtype)),  # widened to 128
        ("paged_attention", attention(6, 2, 32, dtype=dtype)),
        ("paged_attention", attention(8, 2, 48, dtype=dtype, window=20, softcap=5.0)),
        ("paged_attention", attention(4, 4, 32, dtype=dtype, sinks=True, window=7)),
    ]


@pytest.fixture(params=FACTS, ids=lambda entry: entry["version"][:12])
def calls(request, monkeypatch):
    counter = fake_aiter.install(monkeypatch, request.param)
    vendor.forget()
    shared = _shared_attention()
    monkeypatch.setitem(sys.modules, "headrace.platforms.triton.attention", shared)
    monkeypatch.setitem(sys.modules, "headrace.platforms.triton.mla", shared)
    for name in ("attention", "mla"):
        monkeypatch.delitem(sys.modules, f"headrace.platforms.rocm.aiter.{name}", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products: threads would only wait for each other
    yield counter
    torch.set_num_threads(threads)
    for name in ("attention", "mla"):
        sys.modules.pop(f"headrace.platforms.rocm.aiter.{name}", None)
    vendor.forget()


def _shared_attention() -> ModuleType:
    """In place of the shared attention, whose kernel writes the cache: the same by PyTorch."""

    @dataclass
    class Plan:
        decodes: int
        splits: int
        num_tokens: int
        slots: torch.Tensor
        seq_lens: torch.Tensor
        starts: torch.Tensor
        table: torch.Tensor
        tiles: torch.Tensor | None
        block_size: int

    class TritonAttention(PagedAttention):
        graph = GraphSupport.DECODE_ONE

        def write(self, k, v, k_cache, v_cache, plan):
            live = plan.slots >= 0
            block, offset = plan.slots[live] // plan.block_size, plan.slots[live] % plan.block_size
            k_cache[block, :, offset] = k[live]
            v_cache[block, :, offset] = v[live]

    class TritonMLA(TritonAttention):
        @classmethod
        def kv_formats(cls, query):
            return (KVFormat(CANONICAL),)

    module = ModuleType("headrace.platforms.triton.attention")
    module.Plan, module.TritonAttention = Plan, TritonAttention  # type: ignore[attr-defined]
    module.TritonMLA = TritonMLA  # type: ignore[attr-defined]
    return module


def make(op: str, name: str, query: Any) -> Any:
    registry = Registry.with_reference(RocmPlatform().implementations())
    row = next(row for row in registry.candidates(op) if row.name == name)
    assert row.supports(query, MI300).status != "no"
    target = row.load()
    runtime = SimpleNamespace(info=MI300, device=CPU)
    return target(query, runtime) if CONTRACTS[op].kind == "class" or row.per_query else target


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_contracts(calls, dtype):
    """All ops in one test, so that the list of what was called is whole."""
    for op, query in queries(dtype):
        ours, reference = make(op, "aiter", query), make(op, "reference", query)
        result = compare(CONTRACTS[op], query, ours, reference, CPU)
        assert result.within, (op, query, result)
    called = {name for name, places in vendor.PLACES.items() if any(p in calls for p in places)}
    others = {"ActivationType", "QuantType", "CustomAllreduce", "mla_splits"}
    if dtype != "bfloat16":
        others |= {"mla_decode", "mla_prefill"}
    assert called == set(vendor.PLACES) - others


def test_a_call_that_the_package_would_refuse_is_refused(calls):
    with pytest.raises(TypeError, match="too many positional arguments"):
        vendor.find("silu_and_mul")(torch.zeros(1, 2), torch.zeros(1, 4), 0.0, 1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        vendor.find("shuffle_weight")(torch.zeros(1, 16, 32), window=1)


@pytest.mark.parametrize("entry", FACTS, ids=lambda entry: entry["version"][:12])
def test_every_release_has_every_function(entry):
    for name, places in vendor.PLACES.items():
        assert any(entry["places"][place] for place in places), f"{name} of {entry['version']}"


def test_decodes_are_sized_by_tensors_alone(calls):
    """What a graph replays must not depend on the lengths that it was captured with."""
    query = attention(4, 2, 32, dtype="bfloat16")
    op = make("paged_attention", "aiter", query)
    table = scattered_blocks(Requests(((200, 1), (9, 1)), padding=2), 16, 0)
    plans = [
        op.plan(make_batch(Requests(lengths, padding=2), table, 16, CPU), 0)
        for lengths in (((200, 1), (9, 1)), ((3, 1), (1, 1)))
    ]
    sizes = {(p.num_tokens, p.longest_query, p.longest, len(p.seq_lens)) for p in plans}
    assert sizes == {(4, 1, table.shape[1] * 16, 4)}


def test_latent_decodes_are_replayed_for_other_lengths(calls):
    """Fixed addresses and sizes; what AITER makes beside them is kept for as long as a graph may read it."""
    op = make("paged_attention", "aiter", latent(16, "bfloat16"))
    lengths = ((200, 1), (9, 1)), ((3, 1), (40, 1))
    table = scattered_blocks(Requests(lengths[0], padding=2), 16, 0)
    fixed: dict[str, torch.Tensor] = {}
    memory = SimpleNamespace(
        get=lambda name, shape, dtype: fixed.setdefault(name, torch.empty(shape, dtype=dtype))
    )
    cache = torch.randn(1 + int(table.max()), 1, 16, 576).bfloat16()
    q, seen, results = torch.randn(4, 16, 576).bfloat16(), [], []
    for these in lengths:
        batch = make_batch(Requests(these, padding=2), table, 16, CPU)
        fresh = op.attend(q, cache, cache[..., :512], op.plan(batch, 0))
        plan = op.plan(batch, 0, memory)
        (part,) = plan.parts
        tensors = (part.ends, part.slots, part.ones)
        seen.append([(one.data_ptr(), one.shape) for one in tensors])
        torch.testing.assert_close(op.attend(q, cache, cache[..., :512], plan), fresh)
        results.append(fresh)
    assert seen[0] == seen[1] and not torch.equal(*results)
    held = list(op._kept.values())
    vendor.find("mla_splits")(None, 1, 9, 16, 1, torch.bfloat16)  # AITER forgets the other
    assert len(held) == 1 and held[0].tolist() == [0, 2, 4, 6, 8]


def test_weights_of_another_dtype_are_rounded_once(calls):
    op = make("rms_norm", "aiter", NormQuery(64, "bfloat16"))
    weight = torch.randn(64)
    first = op._weight(weight)
    assert first.dtype == torch.bfloat16 and op._weight(weight) is first
    del weight
    assert not len(op._rounded)


@pytest.mark.parametrize("error", [RuntimeError("hipcc"), SystemExit("hipcc")])
def test_a_package_that_cannot_be_imported_is_the_reason(monkeypatch, error):
    """Whatever its compilers throw, and once: the selection goes on to the next implementation."""
    tried = []

    def refuse(name: str) -> None:
        tried.append(name)
        raise error

    monkeypatch.setattr(vendor.importlib, "import_module", refuse)
    vendor.forget()
    for name in ("rms_norm", "fused_moe"):
        with pytest.raises(
            ImportError, match=rf"cannot be imported \({type(error).__name__}: hipcc"
        ):
            vendor.find(name)
    assert tried == ["aiter"]
    vendor.forget()


def test_a_kernel_that_cannot_be_built_fails_its_self_test(calls, monkeypatch):
    """AITER ends the process then; the engine takes the next implementation instead."""

    def refuse(*_: Any, **__: Any) -> None:
        raise SystemExit("build failed")

    monkeypatch.setattr(sys.modules["aiter"], "silu_and_mul", refuse)
    here = [dataclasses.replace(row, requires=()) for row in rows.implementations("rocm", known)]
    runtime: Any = SimpleNamespace(info=MI300, device=CPU, tuned={})
    ops = Ops(Registry.with_reference(here), MI300, runtime)
    assert ops.bind("silu_and_mul", ActivationQuery(64, "bfloat16"))(
        torch.ones(1, 128).bfloat16()
    ).shape == (1, 64)
    (decision,) = ops.report.decisions
    assert decision.chosen == "reference"
    reason = next(row.reasons[0] for row in decision.candidates if row.name == "aiter")
    assert reason == (
        "self-test failed (RuntimeError: AITER could not build silu_and_mul: build failed)"
    )


def test_verdicts():
    judged = {row.op: row for row in rows.implementations("rocm", known)}

    def reasons(op: str, query: Any, arch: str = "gfx942") -> str:
        verdict = judged[op].supports(query, RocmPlatform.describe(arch))
        return f"{verdict.status}: {'; '.join(verdict.reasons)}"

    plain = attention(32, 8, 128, dtype="bfloat16")
    assert reasons("paged_attention", plain).startswith("unverified: ")
    for op, query, why in (
        ("paged_attention", attention(32, 8, 128, dtype="float32"), "dtype float32"),
        ("paged_attention", attention(32, 8, 128, dtype="bfloat16", kv="fp8_e4m3"), "KV in fp8"),
        ("paged_attention", attention(8, 8, 512, dtype="bfloat16"), "heads of 512"),
        ("paged_attention", attention(8, 8, 64, dtype="bfloat16", v_head_dim=32), "values of 32"),
        ("paged_attention", latent(16, "float16"), "not bfloat16"),
        ("paged_attention", latent(8, "bfloat16"), "8 query heads are none of (16, 128)"),
        (
            "paged_attention",
            attention(16, 1, 320, dtype="bfloat16", v_head_dim=256, latent=True),
            "rows of 320 with values of 256",
        ),
        ("topk_softmax", RouterQuery(64, 6, scale=16.0), "softmax over all experts"),
        ("fused_experts", ExpertsQuery(8, 2, 96, 64, "bfloat16"), "no multiple of 128"),
        ("fused_experts", ExpertsQuery(8, 2, 128, 64, "bfloat16", "Q4_K"), "weights in Q4_K"),
        ("fused_experts", ExpertsQuery(8, 2, 128, 64, "bfloat16", activation="gelu"), "gelu"),
        ("topk_softmax", RouterQuery(60, 4), "no power of two"),
        ("topk_softmax", RouterQuery(512, 8), "exceed 256"),
        ("linear", LinearQuery(64, 64, "bfloat16", out_dtype="float32"), "would be rounded"),
        ("rms_norm", NormQuery(100, "bfloat16"), "no multiple of 8"),
    ):
        assert reasons(op, query).startswith("no: ") and why in reasons(op, query)
    for arch in ("gfx90a", "gfx1100", "gfx1201"):
        assert "none of AITER's" in reasons("paged_attention", plain, arch)
    assert "pads intermediate 96 to 128 (+33%" in reasons(
        "fused_experts", ExpertsQuery(8, 2, 128, 96, "bfloat16")
    )
