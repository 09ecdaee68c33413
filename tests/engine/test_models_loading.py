"""Loading: strict names and shapes in one message, tied tables as transformers ties them, progress, shards."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from headrace.engine.layers.rotary import inverse_frequencies
from headrace.engine.models.registry import build_model
from headrace.engine.models.spec import RopeSpec
from headrace.engine.weights.source import ModelError
from tests.engine.model_harness import Engine, StateSource, load_model, make_context
from tests.engine.tiny_models import Tiny, make_tiny, prompt

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("llama-tied", tmp_path_factory.mktemp("tied"))


def changed(tiny: Tiny, **state: torch.Tensor | None) -> StateSource:
    """The tiny model's tensors with some replaced (or, with None, left out); "__" stands for a dot."""
    merged = {**tiny.source.state, **{k.replace("__", "."): v for k, v in state.items()}}
    return StateSource(
        tiny.source.spec, {name: tensor for name, tensor in merged.items() if tensor is not None}
    )


def test_every_fault_is_named_at_once(llama: Tiny) -> None:
    source = changed(
        llama,
        model__norm__weight=None,
        model__layers__2__mlp__up_proj__weight=None,
        model__layers__3__mlp__up_proj__weight=torch.zeros(80, 48),
        model__layers__0__self_attn__q_proj__bias=torch.zeros(48),
        model__layers__1__self_attn__o_proj__weight=torch.zeros(48, 47),
    )
    with pytest.raises(ModelError) as caught:
        load_model(source)
    text = str(caught.value)
    assert "missing: model.layers.2.mlp.up_proj.weight, model.norm.weight" in text
    assert "model.layers.3.mlp.up_proj.weight, model.layers.0.self_attn.q_proj.bias" in text
    assert "model.layers.1.self_attn.o_proj.weight is [48, 47] instead of [48, 48]" in text
    assert "\n" not in text
    assert not source.reads  # nothing is read before everything is known to fit


def test_missing_head_of_an_untied_model_is_missing(llama: Tiny) -> None:
    with pytest.raises(ModelError, match=r"missing: lm_head\.weight"):
        load_model(changed(llama, lm_head__weight=None))


def test_harmless_extras(llama: Tiny) -> None:
    """Tables that the spec already says: inverse frequencies of old checkpoints, rope factors of GGUF files."""
    extras = {
        "model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4),
        "rope_freqs__weight": torch.ones(4),
    }
    tokens = prompt(20)
    engine = Engine(load_model(changed(llama, **extras)))
    torch.testing.assert_close(engine.run(engine.sequence(), tokens), llama.logits(tokens), **CLOSE)


def test_rope_factors_of_a_file_are_used(tmp_path: Path) -> None:
    """Llama 3.1 as GGUF files hold it: no scaling by name, but rope_freqs.weight with the factors."""
    tiny = make_tiny("llama-llama3", tmp_path)
    rope = tiny.source.spec.ropes[0]
    scaled, _ = inverse_frequencies(rope, 8, 64)
    plain, _ = inverse_frequencies(RopeSpec(rope.theta), 8, 64)
    factors = plain / scaled
    assert factors.max() > 2  # it matters
    as_stored = RopeSpec(rope.theta, factors=tuple(factors.tolist()))
    spec = replace(tiny.source.spec, ropes=(as_stored,))
    source = StateSource(spec, {**tiny.source.state, "rope_freqs.weight": factors})
    tokens = prompt(200)
    engine = Engine(load_model(source))
    torch.testing.assert_close(engine.run(engine.sequence(), tokens), tiny.logits(tokens), **CLOSE)


@pytest.mark.parametrize("head", ["absent", "equal", "unlike", "alone"])
def test_tied_embeddings_follow_transformers(tied: Tiny, head: str, tmp_path: Path) -> None:
    table = tied.source.state[EMBED]
    state = {
        "absent": {},
        "equal": {"lm_head__weight": table.clone()},
        "unlike": {"lm_head__weight": torch.randn_like(table)},
        "alone": {"lm_head__weight": table.clone(), EMBED: None},
    }[head]
    source = changed(tied, **state)
    tied.truth.config.save_pretrained(tmp_path)
    save_file(source.state, tmp_path / "model.safetensors", {"format": "pt"})
    truth = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = prompt(20)
    engine = Engine(load_model(source))
    with torch.inference_mode():
        want = truth(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(engine.run(engine.sequence(), tokens), want, **CLOSE)


def test_progress_and_bytes(tied: Tiny) -> None:
    seen: list[tuple[float, float, str]] = []
    model = build_model(tied.source.spec, make_context(), 256)
    held = model.load_weights(tied.source, lambda *step: seen.append(step))
    total = tied.source.total_bytes()
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][0] == pytest.approx(total) and {t for _, t, _ in seen} == {total}
    tables = 256 * 8 * 4  # the rotary table
    assert held == total + tables


def test_each_tensor_is_read_once(llama: Tiny) -> None:
    source = changed(llama)
    load_model(source)
    assert sorted(source.reads) == sorted(source.state)


def test_failing_read_ends_the_load(llama: Tiny) -> None:
    source = changed(llama)
    get = source.get

    def broken(name: str):
        handle = get(name)
        if name == "model.layers.1.mlp.down_proj.weight":
            handle.read = lambda *a, **k: (_ for _ in ()).throw(ModelError("short file"))
        return handle

    source.get = broken
    with pytest.raises(ModelError, match="short file"):
        load_model(source)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_with_a_vision_tower(prefix: str, tmp_path: Path) -> None:
    tiny = make_tiny("gemma3", tmp_path)
    state = {prefix + k.removeprefix("model."): v for k, v in tiny.source.state.items()}
    state["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(3)
    state["multi_modal_projector.mm_input_projection_weight"] = torch.ones(3)
    engine = Engine(load_model(StateSource(tiny.source.spec, state)))
    tokens = prompt(20)
    torch.testing.assert_close(engine.run(engine.sequence(), tokens), tiny.logits(tokens), **CLOSE)


def test_unknown_architecture(llama: Tiny) -> None:
    with pytest.raises(
        ModelError, match=r"'t5' is not supported; supported: .*gemma2, gemma3, llama"
    ):
        build_model(replace(llama.source.spec, architecture="t5"), make_context(), 16)


def test_threads_that_load_enter_the_device_first(llama: Tiny) -> None:
    entered: set[int] = set()
    loaded: set[int] = set()
    model = build_model(llama.source.spec, make_context(), 64)
    model.enter_thread = lambda: entered.add(threading.get_ident())
    for layer in model.layers():
        real = layer.load

        def load(tensors: Any, real: Any = real) -> None:
            loaded.add(threading.get_ident())
            real(tensors)

        layer.load = load  # type: ignore[method-assign]
    model.load_weights(llama.source, lambda *_: None)
    assert loaded and loaded <= entered and threading.get_ident() not in loaded
