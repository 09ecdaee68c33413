"""What is done to logits, on the device: whole vocabularies, graphs, and steps that must not wait for the host."""

from __future__ import annotations

import pytest
import torch

from headrace.engine.core.sampling import SamplingParams
from headrace.engine.runner.sampler import SamplingOps
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.queries import SampleQuery
from headrace.platforms.reference.checks.base import Make
from headrace.platforms.reference.checks.sampling import CHECKS
from headrace.platforms.reference.compare import compare
from tests.engine.test_runner_sampler import VOCAB, Bench

pytestmark = pytest.mark.device

# temperature, top-k, top-p, min-p
OPTIONS = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.7, 50, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.5, 20_000, 0.99, 0.0),  # more than a list holds
    (1.0, 1, 1.0, 0.0),
)


@pytest.mark.parametrize("op", ["logprobs", "penalties", "token_bitmask"])
@pytest.mark.parametrize("vocab", [1000, 128_256, 262_144])
def test_contract(make, runtime, op, vocab):
    query = SampleQuery(vocab, 8)
    ours, reference = make(op, "triton", query), make(op, "reference", query)
    result = compare(CONTRACTS[op], query, ours, reference, runtime.device)
    assert result.within, result


@pytest.mark.parametrize("check", CHECKS)
def test_check(make, runtime, check):
    CHECKS[check](Make(lambda query: make("sample", "triton", query), runtime), "float32")


def drawn(op, logits, options, uniform):
    rows, device = len(logits), logits.device
    temperature, top_k, top_p, min_p = options
    return op(
        logits,
        torch.full((rows,), temperature, device=device),
        torch.full((rows,), top_k, dtype=torch.int32, device=device),
        torch.full((rows,), top_p, device=device),
        torch.full((rows,), min_p, device=device),
        uniform,
    )


@pytest.mark.parametrize("scale", [0.0, 0.02, 0.5, 3.0, 10.0])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_many_rows(make, runtime, scale, options):
    """As the reference draws, but for numbers that fall on the edge between two neighbours in the order."""
    vocab, rows = 128_256, 64
    draws = torch.Generator(runtime.device).manual_seed(0)
    logits = torch.randn(rows, vocab, generator=draws, device=runtime.device) * scale
    logits[::4] = (logits[::4] * 4).round() / 4  # many equal ones
    logits[1::4, vocab // 3 :] = -torch.inf
    uniform = torch.rand(rows, generator=draws, device=runtime.device)
    query = SampleQuery(vocab, rows)
    got, want = (
        drawn(make("sample", name, query), logits, options, uniform)
        for name in ("triton", "reference")
    )
    unlike = (got != want).nonzero().squeeze(1).tolist()
    assert len(unlike) <= rows // 16
    for row in unlike:
        order = logits[row].sort(descending=True, stable=True).indices.tolist()
        assert abs(order.index(int(got[row])) - order.index(int(want[row]))) == 1


@pytest.mark.parametrize("rows", [1, 7, 256])
def test_rows_alone_and_together(make, runtime, rows):
    """Sums are whole numbers: the batch changes nothing."""
    op = make("sample", "triton", SampleQuery(128_256, rows))
    logits = torch.randn(rows, 128_256, device=runtime.device) * 2
    uniform = torch.rand(rows, device=runtime.device)
    for options in OPTIONS:
        together = drawn(op, logits, options, uniform)
        for row in range(0, rows, 50):
            one = slice(row, row + 1)
            assert torch.equal(drawn(op, logits[one], options, uniform[one]), together[one])


def test_rows_that_are_not_finite_are_marked(make, runtime):
    op = make("sample", "triton", SampleQuery(50_000, 5))
    logits = torch.randn(5, 50_000, device=runtime.device)
    logits[1, 7], logits[2, 49_999], logits[3, 0] = torch.nan, torch.inf, -torch.inf
    number = torch.full((5,), 0.5, device=runtime.device)
    for greedy in (True, False):
        options = (number * (not greedy), number.int(), number * 2, number * 0, number)
        ids = op.guarded(logits, *options, greedy)
        assert ids.dtype == torch.int32
        assert (ids < 0).tolist() == [False, True, True, True, False]
        assert torch.equal(ids[[0, 4]].long(), op(logits, *options)[[0, 4]])


def test_graphs_follow_the_options(make, runtime):
    """Which filters are on, and how far they reach, is not known when a step is captured."""
    vocab, rows = 32_000, 6
    op = make("sample", "triton", SampleQuery(vocab, rows))
    device = runtime.device
    logits = torch.randn(rows, vocab, device=device)
    columns = [torch.zeros(rows, device=device) for _ in range(4)]
    temperature, top_p, min_p, uniform = columns
    top_k = torch.zeros(rows, dtype=torch.int32, device=device)
    with torch.cuda.stream(torch.cuda.Stream()):
        op(logits, temperature, top_k, top_p, min_p, uniform)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        ids = op(logits, temperature, top_k, top_p, min_p, uniform)
        graph.capture_end()
        for scale in (3.0, 0.01):
            for options in OPTIONS:
                logits.copy_(torch.randn(rows, vocab, device=device) * scale)
                for column, value in zip((temperature, top_k, top_p, min_p), options, strict=True):
                    column.fill_(value)
                uniform.copy_(torch.rand(rows, device=device))
                graph.replay()
                want = op(logits, temperature, top_k, top_p, min_p, uniform)
                assert torch.equal(ids, want)
        torch.cuda.synchronize()


def test_a_step_does_not_wait_for_the_device(make, runtime):
    """Penalties, bias, stop masks, filters and log-probabilities: PyTorch raises where the host would wait."""
    query = SampleQuery(VOCAB, 8)
    ops = SamplingOps(*(make(op, "triton", query) for op in ("sample", "logprobs", "penalties")))
    requests = (
        ([1, 2, 3, 3], 2, SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=3)),
        ([4, 5, 4], 1, SamplingParams(seed=3, top_p=0.9, frequency_penalty=0.5, min_p=0.01)),
        ([6], 1, SamplingParams(seed=4, top_k=5, logit_bias={7: 2.0, 9: -3.0}, logprobs=0)),
        ([6, 8], 2, SamplingParams(seed=5, min_tokens=3, stop_token_ids=(1, 2))),
    )
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    want = Bench(*requests).sample(logits)
    bench, on_device = Bench(*requests, runtime=runtime, ops=ops), logits.to(runtime.device)
    bench.sampler.sample(on_device, bench.inputs)  # compiles
    bench.sampler.logprobs(on_device, torch.zeros(4, device=runtime.device).int(), bench.inputs)
    for shaped in (True, False):
        if not shaped:
            bench.rows.shaped.fill(False)
        inputs = bench.inputs
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            ids = bench.sampler.sample(on_device, inputs)
            found = bench.sampler.logprobs(on_device, ids, inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert found is not None and len(found[1].entries()) == 2
        if shaped:
            assert ids.tolist() == want
