"""ACL graphs over a recording stand-in of torch.npu: what is captured, what a replay updates, in which order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from headrace.platforms.batch import BatchView
from headrace.platforms.graph import GraphKey
from headrace.platforms.queries import AttentionQuery
from headrace.platforms.reference.cases import Requests, make_batch, make_caches, scattered_blocks
from tests.platforms.npu.simulated import Call, SimulatedNpu, SimulatedRuntime, Wait

QUERY = AttentionQuery(4, 2, 32, 32, "float16", "float16", 0.2)
SIZE, LAYERS, REQUESTS = 128, 2, 4
LENGTHS = ((5, 1), (130, 1), (200, 1))


class Static:
    """StaticBuffers of the engine."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.tensors.setdefault(name, torch.zeros(shape, dtype=dtype))


class Decode:
    """Two layers of attention over buffers of fixed address, as the engine captures them."""

    def __init__(self, make, name: str) -> None:
        self.op = make("paged_attention", name, QUERY)
        self.query = torch.zeros(REQUESTS, 4, 32, dtype=torch.float16)
        self.key, self.value = (torch.zeros(REQUESTS, 2, 32, dtype=torch.float16) for _ in "kv")
        self.caches = [make_caches(self.op, SIZE, 16, torch.device("cpu")) for _ in range(LAYERS)]
        for cache in (cache for pair in self.caches for cache in pair):
            cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(1)))
        self.table = torch.zeros(REQUESTS, 4, dtype=torch.int32)
        self.static = Static()
        self.results: list[torch.Tensor] = []

    def step(self, seed: int, lengths=LENGTHS) -> BatchView:
        """New inputs in the same buffers."""
        requests = Requests(lengths, padding=REQUESTS - len(lengths))
        table = scattered_blocks(requests, SIZE, seed)
        batch = make_batch(requests, table, SIZE, torch.device("cpu"))
        self.table.zero_()[:, : table.shape[1]] = torch.from_numpy(table)
        draw = torch.Generator().manual_seed(seed)
        for buffer in (self.query, self.key, self.value):
            buffer.copy_(torch.randn(buffer.shape, generator=draw))
        return dataclasses.replace(batch, block_tables=[self.table])

    def plan(self, batch: BatchView, static: bool) -> None:
        self.plans = self.op.plan(batch, 0, self.static if static else None)

    def body(self) -> None:
        self.results = []
        for k_cache, v_cache in self.caches:
            self.op.write(self.key, self.value, k_cache, v_cache, self.plans)
            self.results.append(self.op.attend(self.query, k_cache, v_cache, self.plans))

    def run(self, seed: int, lengths=LENGTHS) -> None:
        self.plan(self.step(seed, lengths), static=False)
        self.body()


def capture(decode: Decode, runtime: SimulatedRuntime, batch: BatchView):
    backend = runtime.graphs()
    with backend.session():
        decode.plan(batch, static=True)
        return backend.capture(
            GraphKey("decode", REQUESTS, REQUESTS), decode.body, batch.host_args()
        )


@pytest.fixture
def stream(runtime: SimulatedRuntime) -> Iterator[None]:
    with torch.inference_mode(), runtime.use_stream(runtime.stream()):
        yield


def test_replays_equal_eager_steps(make, runtime, stream):
    graphed, eager = Decode(make, "fia"), Decode(make, "fia")
    graph = capture(graphed, runtime, graphed.step(0))
    eager.run(0)  # the stand-in runs what it captures
    lengths = [LENGTHS, ((400, 1),), ((1, 1), (2, 1), (128, 1), (129, 1)), LENGTHS]
    for seed, some in enumerate(lengths, 1):
        batch = graphed.step(seed, some)
        graphed.plan(batch, static=True)
        graph.replay(batch.host_args())
        eager.run(seed, some)
        for got, want in zip(graphed.results, eager.results, strict=True):
            assert torch.equal(got[: len(some)], want[: len(some)])
            assert torch.isfinite(got).all()


def test_stale_lengths_would_show(make, runtime, stream):
    """The test above can fail: with the lengths of the capture a replay is wrong."""
    graphed, eager = Decode(make, "fia"), Decode(make, "fia")
    first = graphed.step(0)
    graph = capture(graphed, runtime, first)
    eager.run(0)
    longer = ((6, 1), (131, 1), (201, 1))
    batch = graphed.step(1, longer)
    graphed.plan(batch, static=True)
    graph.replay(first.host_args())
    eager.run(1, longer)
    assert not torch.equal(graphed.results[0][:3], eager.results[0][:3])


def test_what_is_captured(make, npu: SimulatedNpu, runtime, stream):
    decode = Decode(make, "fia")
    graph = capture(decode, runtime, decode.step(0))
    tasks = graph._graph._graph.tasks
    names = ["wait" if isinstance(task, Wait) else task.func.__name__ for task in tasks]
    assert names.count("npu_scatter_pa_kv_cache.default") == LAYERS
    # the attention of each layer, and nothing else, lies behind an event
    waits = [at for at, name in enumerate(names) if name == "wait"]
    assert [names[at + 1] for at in waits] == ["npu_fused_infer_attention_score.out"] * LAYERS
    assert names.count("npu_fused_infer_attention_score.default") == 0
    lengths = [task.kwargs["actual_seq_lengths_kv"] for task in tasks if isinstance(task, Call) and
               task.func.__name__.startswith("npu_fused")]  # fmt: skip
    assert lengths == [[5, 130, 200, 1]] * LAYERS
    assert runtime.captures.recorder is None and not npu.running


def test_the_order_of_a_replay(make, npu: SimulatedNpu, runtime, stream):
    decode = Decode(make, "fia")
    graph = capture(decode, runtime, decode.step(0))
    npu.log.clear()
    for seed in (1, 2):
        batch = decode.step(seed)
        decode.plan(batch, static=True)
        graph.replay(batch.host_args())
    layer = [("update", "side"), ("event", "side")]
    first = [("replay",), *layer, *layer]
    assert npu.log == [*first, ("synchronize",), *first]  # a replay waits for the one before it
    graph.release()
    assert not graph._tasks


def test_a_body_that_fails_leaves_no_recorder(runtime, stream):
    batch = make_batch(Requests(((5, 1),)), np.ones((1, 1), np.int32), SIZE, torch.device("cpu"))

    def body() -> None:
        raise RuntimeError("out of memory")

    backend = runtime.graphs()
    with pytest.raises(RuntimeError, match="out of memory"), backend.session():
        backend.capture(GraphKey("decode", 1, 1), body, batch.host_args())
    assert runtime.captures.recorder is None


def test_graphs_say_that_they_need_lengths(runtime):
    traits = runtime.graphs().traits
    assert traits.host_args and traits.max_graphs and traits.shares_pool
