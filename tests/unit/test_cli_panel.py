"""The start-up panel: what a ready server says of itself."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import msgspec
import pytest

from headrace.cli.panel import facts
from headrace.cli.prepare import Plan
from headrace.engine.config.settings import EngineConfig, GraphSettings
from headrace.engine.ipc.messages import EngineReady
from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.source import ModelFiles
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.probe import ResolvedPlatform

URL = "http://127.0.0.1:8000"


@pytest.fixture
def plan() -> Plan:
    device = CpuPlatform.describe("avx2")
    spec = ModelSpec("llama", 2, 64, 128, 4, 2, 16, 100, 512, 1e-6)
    files = ModelFiles(name="/models/small", kind="dummy", root="/models/small", weights=())
    return Plan(EngineConfig(), files, spec, ResolvedPlatform(CpuPlatform(), device, (device,)), ())


@pytest.fixture
def ready() -> EngineReady:
    return EngineReady(
        device="cpu:0",
        device_name="a CPU",
        dtype="float32",
        kv_dtype="float32",
        max_model_len=512,
        block_size=32,
        kv_bytes=1 << 20,
        kv_tokens=2048,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        weight_bytes=1 << 20,
        world=1,
        selection=[{"op": "linear", "chosen": "torch"}, {"op": "sample", "chosen": "reference"}],
        phases={"import": 0.25, "load": 0.5},
        notes=["context of 512 tokens: because", "layout PKHSD, blocks of 32 tokens: so"],
    )


def test_what_was_guessed_of_the_tokenizer_is_shown(plan: Plan, ready: EngineReady) -> None:
    tokenizer = SimpleNamespace(notes=("pre-tokenizer 'x' is unknown",), chat_template=None)
    rows = facts(plan, ready, URL, tokenizer, 0.5)
    assert ("tokenizer", "pre-tokenizer 'x' is unknown") in rows
    assert rows[-1][0] == "try" and f"{URL}/v1/completions" in rows[-1][1]
    tokenizer = SimpleNamespace(notes=(), chat_template="{{ messages }}")
    rows = facts(plan, ready, URL, tokenizer, 0.5)
    assert "tokenizer" not in dict(rows) and "/v1/chat/completions" in rows[-1][1]


def test_memory_adds_up(plan: Plan, ready: EngineReady) -> None:
    tokenizer = SimpleNamespace(notes=(), chat_template=None)
    assert "memory" not in dict(facts(plan, ready, URL, tokenizer, 0.5))
    known = msgspec.structs.replace(ready, free_bytes=5 << 20, step_bytes=1 << 19)
    assert dict(facts(plan, known, URL, tokenizer, 0.5))["memory"] == (
        "5.00 MiB free at start = 1.00 MiB weights + 512 KiB for a step + 1.00 MiB KV cache + 2.50 MiB left"
    )
    graphs = msgspec.structs.replace(known, graphs=14)
    assert (
        "512 KiB for a step and graphs" in dict(facts(plan, graphs, URL, tokenizer, 0.5))["memory"]
    )
    many = msgspec.structs.replace(known, world=2)
    assert "free at start on each" in dict(facts(plan, many, URL, tokenizer, 0.5))["memory"]


def test_graphs_that_are_to_come(plan: Plan, ready: EngineReady) -> None:
    def shown(plan: Plan, ready: EngineReady) -> str | None:
        tokenizer = SimpleNamespace(notes=(), chat_template=None)
        return dict(facts(plan, ready, URL, tokenizer, 0.5)).get("graphs")

    assert shown(plan, ready) is None  # none can be captured here
    planned = msgspec.structs.replace(ready, graphs=14)
    assert shown(plan, planned) == "14, each captured when the server is idle or needs it"
    eager = EngineConfig(graphs=GraphSettings(eager=True))
    assert shown(dataclasses.replace(plan, config=eager), ready) == "none (--enforce-eager)"


def test_notes_stand_below_what_they_explain(plan: Plan, ready: EngineReady) -> None:
    rows = facts(plan, ready, URL, SimpleNamespace(notes=(), chat_template=None), 0.5)
    names = [name for name, _ in rows]
    below = {names[at - 1]: text for at, (name, text) in enumerate(rows) if not name}
    assert below == {"context": ready.notes[0], "KV cache": ready.notes[1]}
    shown = dict(rows)
    assert shown["kernels"] == "torch: linear; reference: sample"
    assert "(settings 0.50" in shown["ready in"] and "weights 0.50" in shown["ready in"]
