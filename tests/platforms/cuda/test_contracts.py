"""Every op of the CUDA platform against the reference, on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from headrace.platforms.linear import Norm
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.queries import (
    ExpertsQuery,
    LinearQuery,
    NormQuery,
    RouterQuery,
    SampleQuery,
)
from headrace.platforms.reference import cases
from headrace.platforms.reference.cases import Requests, make_batch, make_caches, scattered_blocks
from headrace.platforms.reference.compare import compare
from tests.platforms.triton import queries

pytestmark = pytest.mark.device

ALL = [
    named
    for dtype in ("float32", "bfloat16", "float16")
    for group in (
        queries.rows,
        queries.wide_rows,
        queries.experts,
        queries.wide_experts,
        queries.attentions,
        queries.wide_attentions,
        queries.latents,
        queries.wide_latents,
    )
    for named in group(dtype)
]


@pytest.mark.timeout(180)  # random numbers of real sizes are drawn by the host
@pytest.mark.parametrize(("op", "query"), ALL, ids=lambda value: str(value)[:90])
def test_contract(make, runtime, op, query):
    ours, reference = make(op, "triton", query), make(op, "reference", query)
    result = compare(CONTRACTS[op], query, ours, reference, runtime.device)
    assert result.within, result


@pytest.mark.parametrize("vocab", [1000, 32000, 151_936])
def test_sample(make, runtime, vocab):
    query = SampleQuery(vocab, 8)
    ours, reference = make("sample", "triton", query), make("sample", "reference", query)
    result = compare(CONTRACTS["sample"], query, ours, reference, runtime.device)
    assert result.within, result


def test_rows_without_a_finite_logit_give_some_id(make, runtime):
    op = make("sample", "triton", SampleQuery(5000, 4))
    logits = torch.randn(4, 5000, device=runtime.device)
    logits[0], logits[1], logits[2, 7] = torch.nan, -torch.inf, torch.nan
    number = torch.full((4,), 0.5, device=runtime.device)
    for temperature in (0.0, 1.0):
        ids = op(logits, number * 2 * temperature, number.int(), number, number, number)
        assert ((ids >= 0) & (ids < 5000)).all()


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"), [(8, 2, 700), (128, 8, 250), (60, 4, 3000), (128, 8, 6000)]
)
def test_experts_of_many_tokens(make, runtime, experts, top_k, tokens):
    """Tiles of every height, pairs sorted by one program and by many, an expert that nobody chose."""
    query = ExpertsQuery(experts, top_k, 512, 384, "bfloat16")
    draw = cases._Draw(runtime.device, 1)
    w13 = draw.normal(experts, 768, 512, dtype="bfloat16", scale=512**-0.5)
    w2 = draw.normal(experts, 512, 384, dtype="bfloat16", scale=384**-0.5)
    x = draw.normal(tokens, 512, dtype="bfloat16")
    logits = draw.normal(tokens, experts, scale=2.0)
    logits[:, 3] = -100.0
    weights, ids = make("topk_softmax", "reference", RouterQuery(experts, top_k, True))(
        logits, top_k, True
    )
    results = []
    for name in ("triton", "reference"):
        op = make("fused_experts", name, query)
        results.append(op(x, weights, ids, op.pack(w13, w2)))
    relative, absolute = CONTRACTS["fused_experts"].tolerance["bfloat16"]
    torch.testing.assert_close(*results, rtol=relative, atol=absolute)


def test_a_router_takes_nan(make, runtime):
    route = make("topk_softmax", "triton", RouterQuery(60, 4, True))
    logits = torch.randn(5, 60, device=runtime.device)
    logits[1, 7], logits[2], logits[3] = torch.nan, torch.nan, -torch.inf
    weights, ids = route(logits, 4, True)
    assert ((ids >= 0) & (ids < 60)).all()
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert weights[0].isfinite().all() and weights[1:3].isnan().all()


@pytest.mark.parametrize("tokens", [1, 2, 6, 200])
def test_graphs_of_experts_follow_the_router(make, runtime, tokens):
    """Which experts are needed, and how many tiles, is not known when a step is captured."""
    query = ExpertsQuery(32, 4, 256, 128, "bfloat16")
    op, route = make("fused_experts", "triton", query), RouterQuery(32, 4, True)
    route = make("topk_softmax", "triton", route)
    draw = cases._Draw(runtime.device, 2)
    packed = op.pack(
        draw.normal(32, 256, 256, dtype="bfloat16", scale=1 / 16),
        draw.normal(32, 256, 128, dtype="bfloat16", scale=1 / 11),
    )
    x, logits = draw.normal(tokens, 256, dtype="bfloat16"), draw.normal(tokens, 32)
    with torch.cuda.stream(torch.cuda.Stream()):
        op(x, *route(logits, 4, True), packed)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        out = op(x, *route(logits, 4, True), packed)
        graph.capture_end()
        for scale in (1.0, 30.0, 0.0):  # spread, and all tokens on the same experts
            logits.copy_(draw.normal(tokens, 32) * scale)
            graph.replay()
            want = op(x, *route(logits, 4, True), packed)
            torch.testing.assert_close(out, want)
        torch.cuda.synchronize()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "query",
    [
        LinearQuery(4096, 6144, "bfloat16"),
        LinearQuery(1000, 2040, "float16", bias=True),
        LinearQuery(2048, 1536, "bfloat16", out_dtype="float32"),
    ],
    ids=str,
)
def test_products_of_few_rows(make, runtime, monkeypatch, query, splits):
    """Instead of the library, which does them where nothing else was measured."""
    few = {"BLOCK_N": 64, "BLOCK_K": 64, "SPLITS": splits}
    changed = lambda kernel, _query, _options: few if kernel == "few_rows" else {}  # noqa: E731
    monkeypatch.setattr(runtime, "kernel_options", changed)
    ours, reference = make("linear", "triton", query), make("linear", "reference", query)
    result = compare(CONTRACTS["linear"], query, ours, reference, runtime.device)
    assert result.within, result
    monkeypatch.undo()
    draw = cases._Draw(runtime.device, 5)
    packed = ours.pack(
        draw.normal(query.out_features, query.in_features, dtype=query.dtype, scale=1 / 64),
        draw.normal(query.out_features, dtype=query.dtype) if query.bias else None,
    )
    for rows in (2, 17, 64, 100, 128):
        x = draw.normal(rows, query.in_features, dtype=query.dtype)
        relative, absolute = CONTRACTS["linear"].tolerance[query.dtype]
        torch.testing.assert_close(
            ours(x, packed), reference(x, packed), rtol=relative, atol=absolute
        )


@pytest.mark.parametrize("width", [512, 2048, 4096])
def test_kernels_that_start_early_see_what_was_written(make, runtime, width):
    """A graph of products that read their weights, and of experts that read the router's choice, before the kernel
    before has ended, beside the same launches one by one."""
    size, count = 256, 6
    draw = cases._Draw(runtime.device, 7)
    square = make("linear", "triton", LinearQuery(width, width, "bfloat16"))
    router = make("linear", "triton", LinearQuery(width, 32, "bfloat16", out_dtype="float32"))
    route = make("topk_softmax", "triton", RouterQuery(32, 4, True))
    experts = make("fused_experts", "triton", ExpertsQuery(32, 4, width, size, "bfloat16"))
    norm = Norm(torch.ones(width, device=runtime.device), 1e-5)
    layers = [
        (
            square.pack(draw.normal(width, width, dtype="bfloat16", scale=width**-0.5), None),
            router.pack(draw.normal(32, width, dtype="bfloat16", scale=width**-0.5), None),
            experts.pack(
                draw.normal(32, 2 * size, width, dtype="bfloat16", scale=width**-0.5),
                draw.normal(32, width, size, dtype="bfloat16", scale=size**-0.5),
            ),
        )
        for _ in range(count)
    ]
    x, residual = (draw.normal(1, width, dtype="bfloat16") for _ in range(2))

    def body(between: Callable[[], None]) -> torch.Tensor:
        y, total = x, residual
        for dense, gate, weights in layers:
            y, total, _ = square.normed(y, total, norm, dense)
            between()
            y = square(y, dense)
            between()
            logits, total, kept = router.normed(y, total, norm, gate, keep=True)
            between()
            chosen = route(logits, 4, True)
            between()
            y = experts(kept, *chosen, weights)
            between()
        return y

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        body(torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        out = body(lambda: None)
        graph.capture_end()
        for _ in range(20):
            x.copy_(draw.normal(1, width, dtype="bfloat16"))
            graph.replay()
            torch.cuda.synchronize()
            want = body(torch.cuda.synchronize)
            torch.testing.assert_close(out, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_long_and_many(make, runtime, dtype):
    """Contexts of thousands of tokens, a batch of 64, prompts of several tiles: what the cases are too small for."""
    _, query = queries.attention(32, 8, 128, dtype)
    requests = Requests(
        (*((n, 1) for n in range(900, 5000, 130)), (3000, 700), (1025, 1025), (4096, 3))
    )
    draw = cases._Draw(runtime.device, 3)
    results = []
    for name in ("triton", "reference"):
        op = make("paged_attention", name, query)
        draw = cases._Draw(runtime.device, 3)
        results.append(cases.run_attention(op, draw, requests, 32)[0])
    relative, absolute = CONTRACTS["paged_attention"].tolerance[dtype]
    torch.testing.assert_close(*results, rtol=relative, atol=absolute)


def test_decodes_beside_prompts_see_what_was_written(make, runtime):
    """A graph of layers whose kernels overlap (prompts and decodes of a step with each other, and with those before and
    after), beside the same launches one by one."""
    from headrace.platforms.attention import Turn
    from headrace.platforms.triton.attention import MixedPlan

    _, query = queries.attention(32, 8, 128, "bfloat16")
    requests = Requests((*((n, 1) for n in range(300, 2500, 60)), (1900, 300), (200, 200)))
    table = scattered_blocks(requests, 32, 0)
    batch = make_batch(requests, table, 32, runtime.device)
    draw, tokens = cases._Draw(runtime.device, 9), batch.num_tokens
    angles = draw.normal(64, 64, scale=3.0)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    turn = Turn(draw.integers(64, tokens), cos_sin, (draw.normal(128), draw.normal(128)), 1e-6)
    wide, narrow = (make("rms_norm", "triton", NormQuery(n, "bfloat16")) for n in (6144, 4096))
    ones = torch.ones(6144, device=runtime.device)
    layers = []
    for _ in range(6):
        op = make("paged_attention", "triton", query)
        caches = make_caches(op, 32, 1 + int(table.max()), runtime.device)
        for cache in caches:
            cache.normal_()
        weights = draw.normal(6144, 4096, dtype="bfloat16", scale=4096**-0.5)
        plan = op.plan(batch, 0)
        assert isinstance(plan, MixedPlan)
        layers.append((op, caches, plan, weights))
    x = draw.normal(tokens, 4096, dtype="bfloat16")

    def body(between: Callable[[], None]) -> torch.Tensor:
        y = x
        for op, caches, plan, weights in layers:
            y = torch.nn.functional.linear(narrow(y, ones[:4096], 1e-6), weights)
            rows = wide(y, ones, 1e-6).view(tokens, 48, 128)
            between()
            q = op.turn_and_write(*rows.split((32, 8, 8), dim=1), turn, caches, plan)
            between()
            y = op.attend(q, *caches, plan).flatten(1)
            between()
        return narrow(y, ones[:4096], 1e-6)

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        body(torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        out = body(lambda: None)
        graph.capture_end()
        for _ in range(20):
            x.copy_(draw.normal(tokens, 4096, dtype="bfloat16"))
            graph.replay()
            torch.cuda.synchronize()
            want = body(torch.cuda.synchronize)
            torch.testing.assert_close(out, want, rtol=0, atol=0)


def test_split_or_not_is_the_same(make, runtime):
    _, query = queries.attention(32, 8, 128, "float32")
    requests = Requests(((5000, 1), (200, 1), (1, 1)))
    table = scattered_blocks(requests, 32, 0)
    op = make("paged_attention", "triton", query)
    caches = make_caches(op, 32, 1 + int(table.max()), runtime.device)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, device=cache.device))
    q = torch.randn(3, 32, 128, device=runtime.device)
    plan = op.plan(make_batch(requests, table, 32, runtime.device), 0)
    assert plan.splits > 1
    split = op.attend(q, *caches, plan)
    whole = op.attend(q, *caches, dataclasses.replace(plan, splits=1))
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-5)


def test_graph_replays_follow_the_buffers(make, runtime):
    """A captured decode over static tables and lengths, replayed for other sequences than it was captured with."""
    from headrace.platforms.batch import HostArgs
    from headrace.platforms.graph import GraphKey

    _, query = queries.attention(8, 2, 64, "bfloat16")
    op = make("paged_attention", "triton", query)
    first, then = Requests(((40, 1), (70, 1))), Requests(((300, 1), (9, 1)))
    tables = {r: scattered_blocks(r, 16, 5) for r in (first, then)}
    width = max(table.shape[1] for table in tables.values())
    caches = make_caches(op, 16, 64, runtime.device)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, device=cache.device))
    q, k, v = (torch.randn(2, h, 64, device=runtime.device).bfloat16() for h in (8, 2, 2))

    def batch(requests: Requests):
        made = make_batch(requests, tables[requests], 16, runtime.device)
        wide = torch.zeros(2, width, dtype=torch.int32, device=runtime.device)
        wide[:, : tables[requests].shape[1]] = made.block_tables[0]
        made.block_tables = [wide]
        return made

    static, out = batch(first), torch.zeros(2, 8, 64, device=runtime.device).bfloat16()

    def body() -> None:
        plan = op.plan(static, 0)
        op.write(k, v, *caches, plan)
        op.attend(q, *caches, plan, out=out)

    with runtime.use_stream(runtime.stream()):
        body()
        backend = runtime.graphs()
        with backend.session():
            host = HostArgs(static.seq_lens_host, static.query_start_loc_host)
            graph = backend.capture(GraphKey("decode", 2, 2), body, host)
        other = batch(then)
        static.seq_lens.copy_(other.seq_lens)
        static.block_tables[0].copy_(other.block_tables[0])
        static.slot_mappings[0].copy_(other.slot_mappings[0])
        graph.replay(host)
        replayed = out.clone()
        plan = op.plan(other, 0)
        want = op.attend(q, *caches, plan)
    runtime.synchronize()
    torch.testing.assert_close(replayed, want)
    graph.release()
