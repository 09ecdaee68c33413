"""The runner by hand-made plans: inputs, captured decode steps, prompt log-probabilities, rows that break alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.engine.config.settings import GraphSettings
from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.step import NewRow, StepPlan
from headrace.engine.models.base import BuildContext
from headrace.engine.models.registry import build_model
from headrace.engine.runner.graphs import (
    PATIENCE,
    PROMPT,
    RunnerLimits,
    StaticBuffers,
    StepGraphs,
    graph_keys,
)
from headrace.engine.runner.kv import allocate_caches, kv_torch_dtype
from headrace.engine.runner.runner import Runner
from headrace.engine.runner.sampler import SamplingOps
from headrace.platforms.batch import BatchView, HostArgs
from headrace.platforms.collectives import SoloCollectives
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.cpu.runtime import CpuRuntime
from headrace.platforms.graph import Graph, GraphBackend, GraphKey, GraphSupport, GraphTraits
from headrace.platforms.kv_layout import CANONICAL, KVGroup, KVPlan, KVSpec
from headrace.platforms.ops import Ops
from headrace.platforms.queries import SampleQuery
from headrace.platforms.reference.attention import Plan, ReferenceAttention
from headrace.platforms.reference.sampling import sample
from headrace.platforms.registry import Implementation, Registry
from tests.engine.tiny_models import Tiny, make_tiny, prompt

SIZE = 16
ROWS = 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("mistral", tmp_path_factory.mktemp("mistral"))


class FixedAttention(ReferenceAttention):
    """May be captured: with `static`, all that `attend` reads on the device lies in buffers of fixed address."""

    graph = GraphSupport.DECODE_ONE

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> Plan:
        plan = super().plan(batch, group)
        if static is not None:
            fresh = plan.block_table
            plan.block_table = static.get("table", tuple(fresh.shape), fresh.dtype)
            plan.block_table.copy_(fresh)
        return plan


class WithPrompts(FixedAttention):
    graph = GraphSupport.ALWAYS


class LateTables(ReferenceAttention):
    """Looks at block tables when it attends: what is captured is the whole step."""

    graph = GraphSupport.DECODE_ONE

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> Plan:
        plan = super().plan(batch, group)
        plan.block_table = batch.block_tables[group]
        return plan

    def attend(self, q: torch.Tensor, *caches: Any, **named: Any) -> torch.Tensor:
        *pair, plan = caches
        late = dataclasses.replace(plan, block_table=plan.block_table.long())
        return super().attend(q, *pair, late, **named)


class GuardedSample:
    """The reference's, as an op that may be captured."""

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return sample(*args)

    def guarded(self, logits: torch.Tensor, *options: Any) -> torch.Tensor:
        assert all(len(option) == len(logits) for option in options[:-1])
        ids = sample(logits, *options[:-1])
        return torch.where(logits.sum(-1).isfinite(), ids, -1).to(torch.int32)


class Streams(CpuRuntime):
    """A device with streams, as far as the engine can tell."""

    def stream(self) -> Any:
        return object()

    def use_stream(self, stream: Any) -> Any:
        return nullcontext()


@dataclass
class Recorded(Graph):
    body: Callable[[], None]
    inputs: list[Any]
    replays: int = 0

    def replay(self, host: HostArgs) -> None:
        assert [tensor.data_ptr() for tensor in self.inputs] == self.addresses
        assert isinstance(host.seq_lens, np.ndarray)
        self.replays += 1
        self.body()

    def __post_init__(self) -> None:
        self.addresses = [tensor.data_ptr() for tensor in self.inputs]

    def release(self) -> None:
        self.replays = -1


@dataclass
class RecordingGraphs(GraphBackend):
    """Runs bodies, and sees to it that what they read does not move."""

    traits = GraphTraits(host_args=True, max_graphs=None, shares_pool=True)
    graphs: dict[int, Recorded] = field(default_factory=dict)
    prompts: dict[int, Recorded] = field(default_factory=dict)

    def session(self) -> Any:
        return nullcontext()

    def capture(self, key: GraphKey, body: Any, host: HostArgs) -> Graph:
        assert key.num_reqs == len(host.seq_lens) and key.num_tokens == len(body._token_ids)
        if body._gather is not None:  # whatever was there is not looked at
            body._token_ids.fill_(1 << 30)
        tensors = [body._token_ids, body._positions]
        tensors += [plan.block_table for plan in body._context.plans]
        recorded = Recorded(body, tensors)
        (self.prompts if key.phase == PROMPT else self.graphs)[key.num_tokens] = recorded
        return recorded


class Stepper:
    """A runner and block tables filled in order; `step` runs requests by row."""

    def __init__(
        self,
        tiny: Tiny,
        capture: bool = False,
        max_tokens: int = 128,
        own: bool = False,
        graphs: GraphSettings | None = None,
        attention: type[ReferenceAttention] = FixedAttention,
        whole: bool = False,
    ) -> None:
        """`own`: with the CPU's own implementations in place of the reference's. `whole`: what is captured goes from
        the gathers of a step to what it samples."""
        info = CpuPlatform.probe()[0]
        self.runtime = (Streams if whole else CpuRuntime)(info)
        self.backend = RecordingGraphs()
        if capture:
            self.runtime.graphs = lambda: self.backend  # type: ignore[method-assign]
        attention = attention if capture else ReferenceAttention
        target = f"{attention.__module__}:{attention.__name__}"
        rows = [Implementation("paged_attention", "test", target, 1)]
        registry = Registry.with_reference(CpuPlatform().implementations() if own else rows)
        ops = Ops(registry, info, self.runtime)
        context = BuildContext(
            ops, torch.float32, SoloCollectives(), "float32", self.runtime.device
        )
        self.model = build_model(tiny.source.spec, context, 256)
        self.model.load_weights(tiny.source, lambda done, total, text: None)
        vocab = tiny.source.spec.vocab
        query = SampleQuery(vocab, ROWS)
        bound = [ops.bind(op, query) for op in ("sample", "logprobs", "penalties")]
        if whole:
            bound[0] = GuardedSample()
        limits = RunnerLimits(ROWS, max_tokens, 256, graphs or GraphSettings())
        self.runner = Runner(
            self.model, SamplingOps(*bound), self.runtime, SoloCollectives(), limits
        )
        layers = tuple(range(len(self.model.kv_specs)))
        group = KVGroup(self.model.kv_specs[0].window, layers, 0, 80)
        form = self.model.attention_impls[0].kv_formats(self.model.attention_impls[0].query)[0]
        plan = KVPlan(form.layout, SIZE, "float32", (group,))
        self.runner.init_kv(plan)
        self.runner.warm_up(lambda done, total, text: None)
        self.computed = np.zeros(ROWS, np.int32)
        self.length = np.zeros(ROWS, np.int32)
        self.new: list[NewRow] = []
        self.updates: list[tuple[int, int, int, int]] = []
        self.steps = 0

    def add(self, row: int, tokens: list[int], params: SamplingParams) -> None:
        data = np.array(tokens, np.int32).tobytes()
        self.new.append(NewRow(row, str(row), data, len(tokens), params))
        self.updates += [(0, row, i, 1 + row * 12 + i) for i in range(12)]
        self.computed[row], self.length[row] = 0, len(tokens)

    def plan(self, *rows: int, chunk: int = 1000) -> StepPlan:
        """Decodes must come first."""
        index = np.array(rows, np.int32)
        new = np.minimum(self.length[index] - self.computed[index], chunk).astype(np.int32)
        sample = self.computed[index] + new == self.length[index]
        plan = StepPlan(
            self.steps,
            index,
            self.computed[index],
            new,
            sample,
            int(((new == 1) & sample).sum()),
            self.new,
            np.array(self.updates, np.int32).reshape(-1, 4),
        )
        self.computed[index] += new
        self.length[index] += sample
        self.steps += 1
        self.new, self.updates = [], []
        return plan

    def step(self, *rows: int, chunk: int = 1000) -> Any:
        return self.runner.launch(self.plan(*rows, chunk=chunk)).result()

    def greedy(self, row: int, tokens: list[int], count: int) -> list[int]:
        self.add(row, tokens, SamplingParams(temperature=0.0))
        return [int(self.step(row).token_ids[0]) for _ in range(count)]


# Captured steps


def test_captured_steps_equal_plain_ones(tiny: Tiny) -> None:
    plain, captured = Stepper(tiny), Stepper(tiny, capture=True)
    assert sorted(captured.backend.graphs) == [1]  # the others wait for a step of their size
    answers = []
    for stepper in (plain, captured):
        for row in range(5):
            stepper.add(row, prompt(10 + 7 * row), SamplingParams(temperature=0.0))
        found = [stepper.step(*range(5)).token_ids.tolist()]
        for rows in ((0, 1, 2, 3, 4), (3, 1), (4, 0, 2), (2,), (0, 1, 2, 3, 4)) * 4:
            found.append(stepper.step(*rows).token_ids.tolist())
        answers.append(found)
    assert answers[0] == answers[1]
    replays = {size: graph.replays for size, graph in captured.backend.graphs.items()}
    assert replays == {1: 5, 2: 4, 4: 4, 8: 8}  # one of the warm-up
    assert not plain.backend.graphs


SAMPLED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_p=0.9, seed=3),
    SamplingParams(temperature=0.0, repetition_penalty=1.7),
    SamplingParams(temperature=0.8, top_k=9, seed=4, logprobs=2),
    SamplingParams(temperature=0.0, logit_bias={7: 3.0}, logprobs=0),
)


def test_whole_steps_equal_plain_ones(tiny: Tiny) -> None:
    """Sampled within the graph; once more outside where a row changes its logits. Block tables change in between."""
    plain = Stepper(tiny, whole=True, graphs=GraphSettings(eager=True))
    captured = Stepper(tiny, capture=True, attention=LateTables, whole=True)
    answers: list[list[Any]] = []
    for stepper in (plain, captured):
        for row, params in enumerate(SAMPLED):
            stepper.add(row, prompt(10 + 7 * row), params)
        given, first = stepper.updates, 10 + 7 * len(SAMPLED)
        stepper.updates = [update for update in given if update[2] <= first // SIZE]
        late = [update for update in given if update not in stepper.updates]
        found = [stepper.step(*range(5))]
        for count, rows in enumerate(((0, 1, 2, 3, 4), (3, 1), (4, 0, 2), (0,), (1, 0)) * 7):
            # many in a step that is not captured yet; of the last, which are, more in one than it enters itself
            stepper.updates, late = {3: (late[:-20], late[-20:])}.get(count, ([], late))
            if count >= 30:
                few = 12 if count == 30 else 2
                stepper.updates, late = late[:few], late[few:]
            found.append(stepper.step(*rows))
        assert not late
        answers.append(found)
        assert np.array_equal(stepper.runner.rows.tables.numpy(), stepper.runner.rows.tables_host)
    for one, other in zip(*answers, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and not other.nan_rows
        assert one.logprobs.keys() == other.logprobs.keys()
        for index, entry in one.logprobs.items():
            assert entry.top_ids == other.logprobs[index].top_ids
            assert entry.logprob == pytest.approx(other.logprobs[index].logprob, abs=1e-4)
    replays = {size: graph.replays for size, graph in captured.backend.graphs.items()}
    # the warm-up was one step of one request
    assert replays == {1: 8 - PATIENCE, 2: 14 - PATIENCE, 4: 7 - PATIENCE, 8: 7 - PATIENCE}


def test_a_row_of_a_whole_step_that_is_not_finite_fails_alone(tiny: Tiny) -> None:
    stepper = Stepper(tiny, capture=True, attention=LateTables, whole=True)
    for row in range(2):
        stepper.add(row, prompt(20 + row), SamplingParams(temperature=0.0))
    stepper.step(0, 1)
    for _ in range(PATIENCE + 1):
        assert min(stepper.step(0, 1).token_ids) >= 0
    logits = stepper.runner.model.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        found[1, 5] = torch.nan
        return found

    stepper.runner.model.logits = broken  # type: ignore[method-assign]
    result = stepper.step(0, 1)
    assert result.nan_rows == [1] and result.token_ids[0] >= 0 and result.token_ids[1] == -1


def test_mixed_steps_are_not_replayed(tiny: Tiny) -> None:
    stepper = Stepper(tiny, capture=True)
    want = Stepper(tiny).greedy(0, prompt(20), 3)
    stepper.add(0, prompt(20), SamplingParams(temperature=0.0))
    got = [int(stepper.step(0).token_ids[0])]
    for _ in range(2):
        stepper.add(1, prompt(33), SamplingParams(temperature=0.0))
        got.append(int(stepper.step(0, 1).token_ids[0]))
    assert got == want
    assert [graph.replays for graph in stepper.backend.graphs.values()] == [1]  # the warm-up's


def late(stepper: Stepper, sizes: list[int]) -> StepGraphs:
    """Graphs as a device with streams has them: captured beforehand or after some steps, and warmed."""
    graphs = stepper.runner._graphs
    assert graphs is not None
    graphs.release()
    stepper.backend.graphs.clear()
    graphs._asked.clear()
    graphs.warm = True
    graphs.keys = [key for key in graphs.keys if key.num_tokens in sizes]
    return graphs


def test_sizes_are_captured_after_some_steps_of_theirs(tiny: Tiny) -> None:
    want = Stepper(tiny).greedy(0, prompt(20), PATIENCE + 4)
    stepper = Stepper(tiny, capture=True)
    late(stepper, [1, 2])
    stepper.add(0, prompt(20), SamplingParams(temperature=0.0))
    got, counts = [], []
    for _ in want:
        result = stepper.step(0)
        got.append(int(result.token_ids[0]))
        counts.append(result.graphs)
    assert got == want
    # the prompt's step, then steps that wait, then the graph
    assert counts == [0] * (1 + PATIENCE) + [1] * 3
    assert stepper.backend.graphs[1].replays == 3


def test_graphs_are_captured_beforehand_small_ones_first(tiny: Tiny) -> None:
    want = Stepper(tiny).greedy(0, prompt(20), 4)
    stepper = Stepper(tiny, capture=True)
    late(stepper, [1, 2, 4])
    stepper.add(0, prompt(20), SamplingParams(temperature=0.0))
    got = []
    for count, more in ((1, True), (2, True), (3, True), (3, False)):
        got.append(int(stepper.step(0).token_ids[0]))
        assert stepper.runner.capture_graph() == more
        assert sorted(stepper.backend.graphs) == [1, 2, 4][:count]
    assert got == want and stepper.backend.graphs[1].replays == 3


def test_a_size_that_cannot_be_captured_runs_op_by_op(tiny: Tiny, monkeypatch, caplog) -> None:
    want = Stepper(tiny).greedy(0, prompt(20), PATIENCE + 3)
    stepper = Stepper(tiny, capture=True)
    graphs = late(stepper, [1, 2])

    def refuse(*_: Any) -> Graph:
        raise RuntimeError("no memory for a graph")

    monkeypatch.setattr(stepper.backend, "capture", refuse)
    assert stepper.greedy(0, prompt(20), PATIENCE + 3) == want
    assert graphs.count == 0
    # padded to its size all the same, as it is where other ranks have the graph; the next size may work
    assert (key := graphs.pick(stepper.plan(0))) and key.num_reqs == 1
    assert (following := graphs.next()) and following.num_reqs == 2
    assert "decode steps of 1 run without a graph: no memory for a graph" in caplog.text


def test_without_graphs_nothing_is_captured(tiny: Tiny) -> None:
    stepper = Stepper(tiny, capture=True, graphs=GraphSettings(eager=True))
    want = Stepper(tiny).greedy(0, prompt(20), 3)
    assert stepper.greedy(0, prompt(20), 3) == want
    assert not stepper.backend.graphs and not stepper.runner.capture_graph()


def test_captured_prompts_equal_plain_ones(tiny: Tiny) -> None:
    """Whole and in chunks, padded and of just the captured size; a prompt beside a decode is not captured."""
    plain, captured = Stepper(tiny), Stepper(tiny, capture=True, attention=WithPrompts)
    answers = []
    for stepper in (plain, captured):
        found = []
        for row, (length, chunk) in enumerate([(20, 1000), (64, 1000), (90, 40), (3, 1000)]):
            stepper.add(row, prompt(length), SamplingParams(temperature=0.0))
            for _ in range(-(-length // chunk) + 2):
                found.append(stepper.step(row, chunk=chunk).token_ids.tolist())
        stepper.add(4, prompt(50), SamplingParams(temperature=0.0))
        found.append(stepper.step(0, 4).token_ids.tolist())
        found.append(stepper.step(0, 1, 2, 3, 4).token_ids.tolist())
        answers.append(found)
    assert answers[0] == answers[1]
    # of 20, 64, 40, 40, 10 and 3 tokens; of what the warm-up runs, a prompt comes before there are graphs
    assert {size: graph.replays for size, graph in captured.backend.prompts.items()} == {64: 6}


def test_graphs_are_released(tiny: Tiny) -> None:
    stepper = Stepper(tiny, capture=True)
    stepper.runner.close()
    assert all(graph.replays == -1 for graph in stepper.backend.graphs.values())


def test_what_may_be_captured() -> None:
    class Impl:
        graph = GraphSupport.DECODE_ONE

    class Eager:
        graph = GraphSupport.NEVER

    class Group(SoloCollectives):
        capture_safe = False

    def sizes(
        most: int,
        limit: int | None = None,
        impls: Any = (Impl,),
        group: Any = None,
        **settings: Any,
    ) -> Any:
        model: Any = type("Model", (), {"attention_impls": list(impls)})
        traits, group = GraphTraits(False, limit, True), group or SoloCollectives()
        limits = RunnerLimits(most, 1000, 200, GraphSettings(**settings))
        keys = graph_keys(model, group, traits, limits)
        assert all(key.num_reqs == (2 if key.phase == PROMPT else key.num_tokens) for key in keys)
        return [key.num_tokens for key in keys]

    assert sizes(1) == [1]
    assert sizes(6) == [1, 2, 4, 8]
    assert sizes(9) == [1, 2, 4, 8, 12]
    assert sizes(64) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    assert sizes(64, limit=3) == [1, 2, 4]
    assert sizes(64, impls=(Impl, Eager)) == []
    assert sizes(64, group=Group()) == []
    assert sizes(64, eager=True) == []
    assert sizes(64, sizes=(1, 10, 64, 500)) == [1, 10, 64]
    assert sizes(48, sizes=(1, 50, 500)) == [1, 48]
    assert sizes(64, largest=20) == [1, 2, 4, 8, 12, 16]
    assert sizes(64, sizes=(4, 30), largest=20, limit=1) == [4]
    assert sizes(2, impls=(WithPrompts,)) == [1, 2, 64, 128, 192]  # of a context of 200
    assert sizes(2, impls=(WithPrompts,), prompt=130) == [1, 2, 64, 128]
    assert sizes(2, impls=(WithPrompts,), prompt=0) == sizes(2, impls=(WithPrompts, Impl)) == [1, 2]


def test_static_buffers_keep_their_place() -> None:
    buffers = StaticBuffers(torch.device("cpu"))
    first = buffers.get("a", (2, 3), torch.int32)
    assert buffers.get("a", (2, 3), torch.int32) is first
    with pytest.raises(ValueError, match="'a' is"):
        buffers.get("a", (3, 3), torch.int32)


# Inputs


def test_the_next_step_is_launched_before_the_last_is_read(tiny: Tiny) -> None:
    """Its token is read from the pool on the device."""
    want = Stepper(tiny).greedy(0, prompt(20), 6)
    stepper = Stepper(tiny)
    stepper.add(0, prompt(20), SamplingParams(temperature=0.0))
    pending = [stepper.runner.launch(stepper.plan(0)) for _ in range(6)]
    assert [int(step.result().token_ids[0]) for step in pending] == want


def test_rows_in_any_order_and_chunks(tiny: Tiny) -> None:
    """Every step schedules other rows; those about to sample their last known position come first."""
    prompts = {5: prompt(1), 0: prompt(17), 3: prompt(64), 1: prompt(100)}
    want = {row: Stepper(tiny).greedy(0, tokens, 4) for row, tokens in prompts.items()}
    stepper = Stepper(tiny, max_tokens=48)
    for row, tokens in prompts.items():
        stepper.add(row, tokens, SamplingParams(temperature=0.0))
    got: dict[int, list[int]] = {row: [] for row in prompts}
    for chosen in ((5, 1, 3), (3, 0, 1), (0, 5, 1), (3, 5), (1, 0), (0, 1, 3, 5)) * 4:
        rows = sorted(chosen, key=lambda row: stepper.length[row] - stepper.computed[row] > 1)
        tokens = stepper.step(*rows, chunk=12).token_ids.tolist()
        for row, token in zip(rows, tokens, strict=True):
            got[row] += [token] if token >= 0 else []
    assert all(got[row][:4] == want[row] for row in prompts)
    assert min(map(len, got.values())) >= 4


def test_block_changes_apply_in_order(tiny: Tiny) -> None:
    stepper = Stepper(tiny)
    stepper.updates = [(0, 2, 1, 7), (0, 2, 1, 9), (0, 2, 0, 3), (0, 2, 1, 8)]
    stepper.add(0, [1], SamplingParams())
    stepper.step(0)
    rows = stepper.runner.rows
    assert rows.tables[0, 2, :2].tolist() == [3, 8]
    assert np.array_equal(rows.tables.numpy(), rows.tables_host)


def test_nothing_is_sampled_before_the_prompt_ends(tiny: Tiny) -> None:
    stepper = Stepper(tiny)
    stepper.add(0, prompt(20), SamplingParams(temperature=0.0))
    first = stepper.step(0, chunk=13)
    assert first.token_ids.tolist() == [-1] and not first.nan_rows
    assert stepper.step(0).token_ids.tolist() == Stepper(tiny).greedy(0, prompt(20), 1)


# Results


@pytest.mark.parametrize("chunk", [1000, 7])
def test_prompt_logprobs_in_slices_and_chunks(
    tiny: Tiny, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engine.runner.runner.SLICE_ELEMENTS", 5 * 99)
    tokens = prompt(30)
    want = tiny.logits(tokens).log_softmax(-1)
    stepper = Stepper(tiny)
    stepper.add(0, prompt(12), SamplingParams(temperature=0.0))
    stepper.add(1, tokens, SamplingParams(temperature=0.0, prompt_logprobs=3))
    entries = []
    while stepper.computed[1] < 30:
        entries += stepper.step(0, 1, chunk=chunk).prompt_logprobs.get(1, [])
    assert [entry.token_id for entry in entries] == tokens[1:]
    for position, entry in enumerate(entries):
        row = want[position]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert entry.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
    assert not stepper.step(1).prompt_logprobs


@pytest.mark.parametrize("own", [False, True])
def test_a_row_that_is_not_finite_fails_alone(tmp_path: Path, own: bool) -> None:
    """Nor does it poison those that get its blocks afterwards."""
    broken = make_tiny("mistral", tmp_path)
    broken.source.state = dict(broken.source.state)
    table = broken.source.state["model.embed_tokens.weight"].clone()
    table[7] = float("nan")
    broken.source.state["model.embed_tokens.weight"] = table
    good = [token for token in prompt(40) if token != 7]
    stepper = Stepper(broken, own=own)
    want = stepper.greedy(0, good, 5)
    if 7 in want:
        pytest.skip("the answer itself holds the broken token")
    stepper.add(0, good, SamplingParams(temperature=0.0))
    stepper.add(1, [7, *good], SamplingParams(temperature=0.0, logprobs=2))
    result = stepper.step(0, 1)
    assert result.nan_rows == [1] and result.token_ids[1] == -1 and not result.logprobs
    assert result.token_ids[0] == want[0]
    assert stepper.greedy(1, good, 5) == want


# Caches


@pytest.mark.parametrize(
    "layout", [CANONICAL, ("K", "P", "S", "H", "D"), ("P", "K", "S", "H", "D")]
)
def test_caches_follow_the_layout(layout: Any) -> None:
    specs = [KVSpec(2, 4, 4, "bfloat16"), KVSpec(2, 4, 6, "bfloat16")]
    plan = KVPlan(layout, 8, "bfloat16", (KVGroup(0, (0, 1), 0, 5),))
    allocator = CpuRuntime(CpuPlatform.probe()[0]).allocator()
    caches = allocate_caches(plan, specs, allocator.reserve)
    for spec, (key, value) in zip(specs, caches, strict=True):
        assert key.shape == (5, 2, 8, spec.head_dim) and value.shape == (5, 2, 8, spec.v_head_dim)
        order = [axis for axis in layout if axis != "K"]
        strides = [key.stride()["PHSD".index(axis)] for axis in order]
        assert strides == sorted(strides, reverse=True) and strides[-1] == 1
        key.fill_(1)
        assert not value.any()
    assert allocator.stats()["kv_cache"] == 5 * 8 * 2 * (4 + 4 + 4 + 6) * 2


def test_unknown_kv_dtypes_are_named() -> None:
    with pytest.raises(ValueError, match="unknown KV dtype 'int3'"):
        kv_torch_dtype("int3")


def test_a_plan_without_a_layer_is_refused() -> None:
    plan = KVPlan(CANONICAL, 8, "float32", (KVGroup(0, (0,), 0, 2),))
    allocator = CpuRuntime(CpuPlatform.probe()[0]).allocator()
    with pytest.raises(ValueError, match=r"no group for layers \[1\]"):
        allocate_caches(plan, [KVSpec(1, 4, 4, "float32")] * 2, allocator.reserve)
