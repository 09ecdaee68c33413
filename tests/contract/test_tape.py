"""Tapes: what is recorded, what is refused, and that replay reads its buffers anew."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.platforms.batch import HostArgs
from headrace.platforms.cpu.builds import FEATURE
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.graph import EagerGraphs, GraphKey
from headrace.platforms.queries import ExpertsQuery, LinearQuery, NormQuery, RouterQuery

HOST = HostArgs(np.zeros(1, np.int32), np.zeros(2, np.int32))


@pytest.fixture
def runtime():
    device = CpuPlatform.probe()[0]
    if FEATURE not in device.features:
        pytest.skip("the native kernels are not built on this machine")
    opened = CpuPlatform().open(device)
    yield opened
    opened.close()


@pytest.fixture
def step(runtime):
    """norm -> linear over a static input; `glue` runs between them."""
    from headrace.platforms.cpu.native_ops import NativeLinear, NativeNorm

    norm = NativeNorm(NormQuery(64, "float32"), runtime)
    linear = NativeLinear(LinearQuery(64, 32, "float32"), runtime)
    packed = linear.pack(torch.randn(32, 64), None)
    weight, x, results = torch.rand(64), torch.randn(3, 64), []

    def make(glue=lambda y: y):
        def body():
            results.append(linear(glue(norm(x, weight, 1e-6)), packed))

        return body

    return make, x, results


def test_replay_equals_eager_after_the_input_changed(runtime, step):
    make, x, results = step
    body = make(lambda y: y.view(3, 8, 8).flatten(1))  # views may be captured
    graph = runtime.graphs().capture(GraphKey("decode", 3, 3), body, HOST)
    captured = results[-1]
    x.copy_(torch.randn(3, 64))
    graph.replay(HOST)
    body()
    assert torch.equal(captured, results[-1])
    norm, linear = graph.profile()
    assert (norm.op, linear.op) == ("rms_norm", "linear") and norm.seconds > 0
    assert (linear.detail, linear.weight_bytes) == ("64x32 float32", 64 * 32 * 4)


@pytest.mark.parametrize(
    ("glue", "name"),
    [(lambda y: y * 2, "mul"), (lambda y: y.add_(1), "add_"), (lambda y: y.clone(), "clone")],
)
def test_a_body_that_computes_with_torch_is_not_captured(runtime, step, glue, name, caplog):
    make, x, results = step
    graph = runtime.graphs().capture(GraphKey("decode", 3, 3), make(glue), HOST)
    assert isinstance(graph, type(EagerGraphs().capture(GraphKey("decode", 1, 1), make(), HOST)))
    assert name in caplog.text
    x.copy_(torch.randn(3, 64))
    graph.replay(HOST)  # and so it is still right
    eager = results[-1]
    make(glue)()
    assert torch.equal(eager, results[-1])


def test_an_arena_gives_a_piece_again_only_when_no_view_of_it_is_left():
    from headrace.platforms.cpu.kernels import Arena

    arena = Arena()
    first = arena.empty((4, 64), torch.float32)
    address, view = first.data_ptr(), first.view(16, 16)[:, :8]
    del first
    assert arena.empty((4, 64), torch.float32).data_ptr() != address
    del view
    taken = {arena.empty((4, 64), torch.float32).data_ptr()}
    assert address in taken or arena.nbytes == 2 * 1024
    assert address % 64 == 0


def test_a_step_with_experts_is_captured(runtime):
    """Router and experts in a tape: other tokens go to other experts at replay."""
    from headrace.platforms.cpu.experts import NativeExperts, NativeRouter
    from headrace.platforms.cpu.native_ops import NativeLinear

    torch.manual_seed(0)
    gate = NativeLinear(LinearQuery(64, 6, "bfloat16", out_dtype="float32"), runtime)
    route = NativeRouter(RouterQuery(6, 2, True), runtime)
    experts = NativeExperts(ExpertsQuery(6, 2, 64, 32, "bfloat16"), runtime)
    table = gate.pack(torch.randn(6, 64).bfloat16(), None)
    packed = experts.pack(*(torch.randn(6, 64, n).bfloat16() / 8 for n in (64, 32)))
    x, results = torch.randn(5, 64).bfloat16(), []

    def body():
        weights, ids = route(gate(x, table), 2, True)
        results.append((ids, experts(x, weights, ids, packed)))

    graph = runtime.graphs().capture(GraphKey("decode", 5, 5), body, HOST)
    for _ in range(3):
        x.copy_(torch.randn(5, 64))
        graph.replay(HOST)
        body()
        for captured, eager in zip(results[0], results[-1], strict=True):
            assert torch.equal(captured, eager)
    assert [row.op for row in graph.profile()] == ["linear", "route", "experts"]
    assert graph.profile()[2].detail == "2 of 6, 64x32"
