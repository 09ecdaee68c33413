"""What is known of a model without building it: its queries, its size, and that no torch is needed for either."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.engine.models.registry import build_model, model_shape, selection_queries, supported
from headrace.engine.weights.layout import tensor_shapes
from headrace.engine.weights.spec_hf import FAMILIES
from headrace.platforms.collectives import SoloCollectives
from tests.engine.model_harness import make_context
from tests.engine.tiny_models import CONFIGS, make_tiny


def test_every_family_that_configs_may_name_can_be_built() -> None:
    assert supported() == sorted(FAMILIES)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "gemma2", "gemma3"])
def test_queries_are_those_that_building_binds(name: str, world: int, tmp_path: Path) -> None:
    spec = make_tiny(name, tmp_path).source.spec
    group = SoloCollectives()
    group.world = world
    ctx = make_context(torch.bfloat16, group)
    build_model(spec, ctx, 64)
    bound = [(decision.op, decision.query) for decision in ctx.ops.report.decisions]
    assert selection_queries(spec, "bfloat16", world=world) == bound
    assert len(bound) == len(set(bound))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_parameters_are_counted(name: str, tmp_path: Path) -> None:
    tiny = make_tiny(name, tmp_path)
    shape = model_shape(tiny.source.spec)
    # a router's bias is a buffer there, as no gradient trains it
    biases = [b for n, b in tiny.truth.named_buffers() if n.endswith("e_score_correction_bias")]
    assert shape.parameters == tiny.truth.num_parameters() + sum(b.numel() for b in biases)
    assert (shape.vocab, shape.layers, shape.dtype) == (99, 3, "float32")


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_dummy_weights_are_the_tensors_that_a_model_wants(name: str, tmp_path: Path) -> None:
    spec = make_tiny(name, tmp_path).source.spec
    wanted = [
        w for layer in build_model(spec, make_context(), 64).layers() for w in layer.weights()
    ]
    assert tensor_shapes(spec) == {w.name: w.shape for w in wanted if not w.optional}


def test_equal_layers_share_an_attention_instance(tmp_path: Path) -> None:
    spec = make_tiny("gemma3", tmp_path).source.spec
    model = build_model(spec, make_context(), 64)
    local, other, full = model.attention_impls
    assert local is other and local is not full


def test_no_torch_is_needed() -> None:
    code = """
import sys
from headrace.engine.models.registry import model_shape, selection_queries
from headrace.engine.models.spec import ModelSpec
spec = ModelSpec("gemma3", 2, 64, 128, 4, 2, 16, 100, 512, 1e-6, qk_norm=True, activation="gelu_tanh")
assert selection_queries(spec, "bfloat16") and model_shape(spec).parameters
assert "torch" not in sys.modules, "torch was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
