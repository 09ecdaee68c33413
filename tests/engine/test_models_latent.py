"""Latent attention beyond the families' common tests: dummy weights, quantization at load, layers that are left aside,
and the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.engine.models.registry import build_model
from headrace.engine.runner.kv import allocate_caches
from headrace.engine.weights.layout import tensor_shapes
from headrace.engine.weights.local import files_at
from headrace.engine.weights.online import online_schemes
from headrace.engine.weights.sources import open_source
from headrace.platforms.kv_layout import KVGroup, KVPlan, KVSpec
from headrace.platforms.registry import SelectionError
from tests.engine.driver import LocalEngine, greedy
from tests.engine.model_harness import Engine, load_model, make_context, make_ops
from tests.engine.tiny_models import Tiny, make_tiny, prompt

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("deepseek_v3", tmp_path_factory.mktemp("deepseek_v3"))


def test_dummy_weights(tiny: Tiny, tmp_path: Path) -> None:
    tiny.truth.config.save_pretrained(tmp_path)
    source = open_source(files_at("tiny", tmp_path, "dummy"))
    engine = Engine(load_model(source, ops=make_ops("cpu")))
    assert engine.run(engine.sequence(), prompt(20)).isfinite().all()


def test_layers_that_guess_further_tokens_are_left_aside(tiny: Tiny) -> None:
    tokens, state = prompt(30), tiny.source.state
    further = {
        name.replace("layers.2.", "layers.3."): value
        for name, value in state.items()
        if "layers.2." in name
    }
    further["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    state.update(further)
    try:
        engine = Engine(load_model(tiny.source))
    finally:
        for name in further:
            del state[name]
    got = engine.run(engine.sequence(), tokens)
    torch.testing.assert_close(got, tiny.logits(tokens), **CLOSE)


def test_quantized_at_load(tiny: Tiny) -> None:
    """Queries, experts and the rest on blocks; what is multiplied into the queries stays as it is."""
    shapes = tensor_shapes(tiny.source.spec)
    schemes = online_schemes(shapes, {}, "int8")
    assert not any(name.endswith(("kv_b_proj.weight", ".gate.weight")) for name in schemes)
    assert schemes["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"] == "Q8_0"
    ctx = make_context(ops=make_ops("cpu"))
    ctx.schemes = schemes
    model = build_model(tiny.source.spec, ctx, 64)
    model.load_weights(tiny.source, lambda done, total, text: None)
    if not any(getattr(d.query, "scheme", "") == "Q8_0" for d in ctx.ops.report.decisions):
        pytest.skip("the native kernels are not built")
    engine, tokens = Engine(model), prompt(30)
    want = tiny.logits(tokens)
    error = (engine.run(engine.sequence(), tokens, chunk=16) - want).abs()
    assert 0 < error.median() < 0.05 * want.std()


def test_values_are_a_view_of_the_keys() -> None:
    spec = KVSpec(1, 24, 16, "bfloat16", latent=True)
    group = KVGroup(0, (0,), bytes_per_block=4 * spec.bytes_per_token(2), num_blocks=3)
    plan = KVPlan(("P", "K", "H", "S", "D"), 4, "bfloat16", (group,))
    taken = []

    def reserve(size: int, tag: str) -> torch.Tensor:
        taken.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    ((keys, values),) = allocate_caches(plan, [spec], reserve)
    assert (keys.shape, values.shape) == ((3, 1, 4, 24), (3, 1, 4, 16))
    assert taken == [plan.total_bytes]
    keys[2, 0, 3, :16] = 5.0
    assert (values[2, 0, 3] == 5.0).all()
    with pytest.raises(ValueError, match="has no scales, which int8 needs"):
        allocate_caches(plan, [KVSpec(1, 24, 16, "int8", latent=True)], reserve)


def test_a_cache_with_scales_is_refused(tiny: Tiny) -> None:
    """Of an int8 cache each row has a scale, which a part of it has not."""
    ctx = make_context(ops=make_ops("cpu"))
    ctx.kv_dtype = "int8"
    with pytest.raises(SelectionError, match="a latent cache has no scales, which int8 needs"):
        build_model(tiny.source.spec, ctx, 64)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_smaller_kv(tiny: Tiny, tmp_path: Path, kv_dtype: str) -> None:
    """The first answers agree with exact ones: a row is rounded to 8 bits of mantissa or more."""
    make_tiny("deepseek_v3", tmp_path)
    prompts = [prompt(n) for n in (1, 9, 33, 70)]
    params = [greedy(4, logprobs=0)] * len(prompts)
    with LocalEngine(tmp_path, kv_cache_dtype=kv_dtype) as engine:
        answers = engine.run(prompts, params)
    for own, answer in zip(prompts, answers, strict=True):
        want = tiny.logits([*own, *answer.tokens])[len(own) - 1 : -1].log_softmax(-1)
        for row, got in zip(want, answer.logprobs, strict=True):
            assert got.logprob == pytest.approx(float(row[got.token_id]), abs=0.1)
