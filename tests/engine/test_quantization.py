"""--quantization end to end: what a start chooses, what it refuses, how far answers move; and a step's profile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from headrace.engine.core.executor import WorkerFailed
from headrace.engine.weights.source import ModelError
from headrace.platforms.cpu.builds import FEATURE
from headrace.platforms.cpu.platform import CpuPlatform
from tests.engine.driver import LocalEngine, greedy
from tests.engine.tiny_models import make_tiny, prompt

BUILT = FEATURE in CpuPlatform.probe()[0].features
needs_build = pytest.mark.skipif(not BUILT, reason="the native kernels are not built")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose rows can be cut into blocks, but for those of down_proj."""
    path = tmp_path_factory.mktemp("blocks")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 2:
                value.copy_(torch.randn_like(value) * 0.15)
    model.save_pretrained(path)
    return path


def scores(model: Path, **settings: object) -> tuple[np.ndarray, list[dict]]:
    """Log-probabilities of a prompt's tokens, and what was chosen."""
    with LocalEngine(model, **settings) as engine:
        (answer,) = engine.run([prompt(100)], greedy(1, prompt_logprobs=0))
        return np.array([one.logprob for one in answer.prompt_logprobs]), engine.info.selection


@needs_build
def test_answers_move_little_and_less_with_more_bits(folder):
    exact, chosen = scores(folder)
    assert not any(row["query"].get("scheme") for row in chosen)
    moved = {}
    for kind, scheme in (("int8", "Q8_0"), ("q4", "Q4_0")):
        got, chosen = scores(folder, quantization=kind)
        moved[kind] = np.abs(got - exact).mean()
        schemes = {
            (row["query"]["in_features"], row["query"]["out_features"]): row["query"]["scheme"]
            for row in chosen
            if row["op"] == "linear"
        }
        assert schemes == {
            (64, 128): scheme,  # q, k and v
            (64, 64): scheme,
            (64, 160): scheme,
            (80, 64): "",  # rows of 80
            (64, 99): "Q8_0",
        }
    assert 0 < moved["int8"] < 0.03 and moved["int8"] * 3 < moved["q4"] < 0.5


def test_refused_where_no_kernel_computes_on_blocks(folder):
    with pytest.raises((WorkerFailed, ModelError), match="--quantization int8 has no kernel"):
        scores(folder, quantization="int8", disable=("native",))


def test_refused_where_nothing_can_be_cut_into_blocks(tmp_path):
    make_tiny("llama", tmp_path)  # rows of 48 and 80
    with pytest.raises((WorkerFailed, ModelError), match="nothing to do"):
        scores(tmp_path, quantization="q4")


@needs_build
def test_a_step_op_by_op(folder):
    with LocalEngine(folder, quantization="int8") as engine:
        step = engine.executor.call("profile_step", 3, 50)
        ops = [op for op, *_ in step["ops"]]
        assert ops.count("attention") == 2 and ops.count("linear") == 2 * 4 + 1
        assert ops[0] == "embedding" and step["step_s"] > 0 and step["bandwidth"] > 0
        last = step["ops"][-1]
        assert last[:2] == ("linear", "64x99 Q8_0") and last[2] > 64 * 99
        assert all(seconds > 0 for *_, seconds in step["ops"])
        keys = [nbytes for op, _, nbytes, *_ in step["ops"] if op == "attention"]
        assert (
            keys == [keys[0]] * 2 and keys[0] > 3 * 50 * 2 * 2 * 16
        )  # what 3 requests' contexts hold
        (after,) = engine.run([prompt(20)], greedy(8))  # nothing of it stays behind
    with LocalEngine(folder, quantization="int8") as engine:
        (clean,) = engine.run([prompt(20)], greedy(8))
    assert after.tokens == clean.tokens
