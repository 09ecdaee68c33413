"""Graphs: what a replay computes after its buffers changed equals what the body computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.platforms.batch import HostArgs
from headrace.platforms.graph import EagerGraphs, GraphKey
from headrace.platforms.ops import Ops
from headrace.platforms.queries import ActivationQuery, LinearQuery, NormQuery


@pytest.fixture(params=["eager", "runtime"])
def backend(request, runtime):
    return EagerGraphs() if request.param == "eager" else runtime.graphs()


def test_capture_change_replay(backend, runtime, registry):
    """A feed-forward block over static buffers, at two sizes captured in one session, largest first."""
    ops = Ops(registry, runtime.info, runtime)
    up = ops.bind("linear", LinearQuery(32, 128, "float32"))
    down = ops.bind("linear", LinearQuery(64, 32, "float32"))
    act = ops.bind("silu_and_mul", ActivationQuery(64, "float32"))
    norm = ops.bind("fused_add_rms_norm", NormQuery(32, "float32"))
    torch.manual_seed(0)
    weights = [torch.randn(128, 32), torch.randn(32, 64)]
    packed = up.pack(weights[0], None), down.pack(weights[1], None)
    scale = torch.randn(32)
    x, residual, out = (torch.zeros(8, 32) for _ in range(3))

    def body(size: int):
        def run() -> None:
            y = down(act(up(x[:size], packed[0])), packed[1])
            out[:size].copy_(norm(y, residual[:size].clone(), scale, 1e-5)[0])

        return run

    def host(size: int) -> HostArgs:
        return HostArgs(np.ones(size, np.int32), np.arange(size + 1, dtype=np.int32))

    graphs = {}
    with backend.session():
        for size in (8, 3):
            graphs[size] = backend.capture(GraphKey("decode", size, size), body(size), host(size))
    for seed, size in ((1, 8), (2, 3), (3, 8)):
        torch.manual_seed(seed)
        x.copy_(torch.randn(8, 32))
        residual.copy_(torch.randn(8, 32))
        body(size)()
        want = out.clone()
        out[:size].fill_(torch.nan)
        graphs[size].replay(host(size))
        runtime.synchronize()
        assert torch.equal(out, want)
    for graph in graphs.values():
        graph.release()
