"""The whole engine over AITER's stand-in, on the CPU: what the adapters are given by a real model, and that selection,
self-tests, KV layout and packed weights fit together. Tokens are those of the reference in the same dtype."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from headrace.cli.conformance.local_engine import LocalEngine, greedy
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.rocm.aiter import rows, vendor
from headrace.platforms.rocm.platform import RocmPlatform, known
from tests.engine import tiny_models
from tests.platforms.rocm import fake_aiter
from tests.platforms.rocm.aiter_facts import load
from tests.platforms.rocm.test_aiter import _shared_attention

WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "mistral": {"sliding_window": 16},
    "gemma2": {"head_dim": 16},
    "qwen3_moe": {"num_experts": 8, **WIDE, "moe_intermediate_size": 64},
}
OPS = {"paged_attention", "rms_norm", "fused_add_rms_norm"}
EXPECTED = {
    "mistral": OPS | {"silu_and_mul"},
    "gemma2": (OPS - {"fused_add_rms_norm"}) | {"gelu_tanh_and_mul"},
    "qwen3_moe": OPS | {"topk_softmax", "fused_experts"},
}


@pytest.fixture
def described(monkeypatch):
    """An MI300X that computes on this machine's processor, with AITER alone."""
    device = dataclasses.replace(RocmPlatform.describe("gfx942"), memory=8 << 30)
    calls = fake_aiter.install(monkeypatch, load()[0])
    vendor.forget()
    monkeypatch.setitem(sys.modules, "headrace.platforms.triton.attention", _shared_attention())
    monkeypatch.delitem(sys.modules, "headrace.platforms.rocm.aiter.attention", raising=False)
    here = [dataclasses.replace(row, requires=()) for row in rows.implementations("rocm", known)]

    def opened(self: RocmPlatform, info: Any) -> Any:
        cpu = CpuPlatform()
        runtime = cpu.open(cpu.probe()[0])
        runtime.info = info
        return runtime

    monkeypatch.setattr(RocmPlatform, "open", opened)
    monkeypatch.setattr(RocmPlatform, "implementations", lambda self: here)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products: threads would only wait for each other
    yield device, calls, here
    torch.set_num_threads(threads)
    sys.modules.pop("headrace.platforms.rocm.aiter.attention", None)
    vendor.forget()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_reference(described, tmp_path, monkeypatch, name):
    device, calls, here = described
    settings = {**tiny_models.CONFIGS[name], **MODELS[name]}
    monkeypatch.setitem(tiny_models.CONFIGS, name, settings)
    tiny_models.make_tiny(name, tmp_path)
    prompts = [tiny_models.prompt(length) for length in (1, 17, 40)]
    answers = []
    for implementations in (here, []):
        monkeypatch.setattr(RocmPlatform, "implementations", lambda self, i=implementations: i)
        with LocalEngine(tmp_path, device, dtype="bfloat16", max_num_batched_tokens=16) as engine:
            chosen = {row["op"] for row in engine.info.selection if row["chosen"] == "aiter"}
            assert chosen >= EXPECTED[name] if implementations else not chosen
            answers.append([answer.tokens for answer in engine.run(prompts, greedy(6))])
    assert answers[0] == answers[1] and all(len(tokens) == 6 for tokens in answers[0])
    assert sum(calls.values()) > 100
