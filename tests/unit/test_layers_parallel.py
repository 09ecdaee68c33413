"""Sharded layers: what the ranks compute together equals what one computes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.engine.layers.base import shard_kv_heads, tensor_bytes, walk
from headrace.engine.layers.linear import (
    Linear,
    Part,
    RowParallelLinear,
    gate_up_linear,
    qkv_linear,
)
from headrace.engine.layers.vocabulary import EMBED, HEAD, Vocabulary
from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.source import ModelError
from headrace.platforms.collectives import SoloCollectives
from tests.engine.model_harness import StateHandle, make_context

HIDDEN = 12


def rank_context(rank: int, world: int) -> Any:
    """A context whose collectives do nothing: the test adds or concatenates the ranks' results itself."""
    group = SoloCollectives()
    group.rank, group.world = rank, world
    return make_context(collectives=group)


def tensors(**shapes: tuple[int, ...]) -> dict[str, StateHandle]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: StateHandle(name, torch.randn(shape, generator=generator))
        for name, shape in ((key.replace("__", "."), shape) for key, shape in shapes.items())
    }


def loaded(layer: Any, state: dict[str, StateHandle]) -> Any:
    assert {w.name for w in layer.weights()} <= set(state)
    assert all(state[w.name].shape == w.shape for w in layer.weights())
    layer.load(state)
    return layer


QKV = tensors(
    a__q_proj__weight=(8 * 4, HIDDEN),
    a__k_proj__weight=(2 * 4, HIDDEN),
    a__v_proj__weight=(2 * 4, HIDDEN),
    a__q_proj__bias=(8 * 4,),
    a__k_proj__bias=(2 * 4,),
    a__v_proj__bias=(2 * 4,),
)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_qkv(world: int) -> None:
    """Query heads are divided; KV heads too, or shared by ranks when there are fewer than ranks."""
    x = torch.randn(5, HIDDEN)
    q, k, v = (
        torch.nn.functional.linear(x, QKV[f"a.{p}.weight"].value, QKV[f"a.{p}.bias"].value)
        for p in ("q_proj", "k_proj", "v_proj")
    )
    for rank in range(world):
        layer = loaded(qkv_linear(rank_context(rank, world), "a", HIDDEN, (8, 2, 4), True), QKV)
        kv = max(2 // world, 1) * 4
        got = layer(x).split([32 // world, kv, kv], dim=1)
        first = rank * 2 // world * 4
        torch.testing.assert_close(got[0], q.chunk(world, dim=1)[rank])
        torch.testing.assert_close(got[1], k[:, first : first + kv])
        torch.testing.assert_close(got[2], v[:, first : first + kv])


@pytest.mark.parametrize("world", [1, 3])
def test_row_parallel_adds_the_bias_once(world: int) -> None:
    state = tensors(o__weight=(7, HIDDEN), o__bias=(7,))
    x = torch.randn(5, HIDDEN)
    parts = [
        loaded(RowParallelLinear(rank_context(r, world), "o", HIDDEN, 7, True), state)(
            x.chunk(world, dim=1)[r]
        )
        for r in range(world)
    ]
    want = torch.nn.functional.linear(x, state["o.weight"].value, state["o.bias"].value)
    torch.testing.assert_close(sum(parts), want)


def test_gate_up_keeps_each_ranks_halves_together() -> None:
    state = tensors(m__gate_proj__weight=(8, HIDDEN), m__up_proj__weight=(8, HIDDEN))
    x = torch.randn(5, HIDDEN)
    gate, up = (x @ state[f"m.{p}.weight"].value.T for p in ("gate_proj", "up_proj"))
    for rank in range(2):
        layer = loaded(gate_up_linear(rank_context(rank, 2), "m", HIDDEN, 8, False), state)
        want = torch.cat([gate.chunk(2, dim=1)[rank], up.chunk(2, dim=1)[rank]], dim=1)
        torch.testing.assert_close(layer(x), want)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda ctx: qkv_linear(ctx, "a", HIDDEN, (8, 2, 4), False),
            "8 attention heads cannot be divided over 3 workers; use .* divides 8",
        ),
        (
            lambda ctx: shard_kv_heads(2, ctx),
            "2 key/value heads cannot be replicated evenly over 3",
        ),
        (
            lambda ctx: gate_up_linear(ctx, "m", HIDDEN, 8, False),
            "8 intermediate features cannot be divided over 3 workers",
        ),
    ],
)
def test_what_cannot_be_divided_is_said(make: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        make(rank_context(0, 3))


def vocabulary_spec(**changes: Any) -> ModelSpec:
    sizes = dict.fromkeys(("layers", "intermediate", "heads", "kv_heads", "head_dim"), 1)
    return ModelSpec(
        "llama", hidden=HIDDEN, vocab=11, max_position=8, norm_eps=1e-6, **sizes, **changes
    )


VOCABULARY = {
    EMBED: StateHandle(EMBED, torch.randn(11, HIDDEN)),
    HEAD: StateHandle(HEAD, torch.randn(11, HIDDEN)),
}


@pytest.mark.parametrize("world", [1, 2, 4, 16])
def test_vocabulary_is_divided_with_padding(world: int) -> None:
    """11 rows over 2, 4 or 16 ranks: the last ranks hold zero rows, or nothing but zero rows."""
    spec = vocabulary_spec(final_softcap=3.0, embedding_scale=2.0)
    ids = torch.arange(11, dtype=torch.int32)
    x = torch.randn(5, HIDDEN)
    embedded, logits = [], []

    for rank in range(world):
        ctx = rank_context(rank, world)
        gathered: list[torch.Tensor] = []
        ctx.collectives.all_gather = lambda t, dim, seen=gathered: seen.append(t) or t
        layer = loaded(Vocabulary(ctx, spec), VOCABULARY)
        embedded.append(layer.embed(ids))
        alone = layer.logits(x)
        logits.append(gathered[0] if world > 1 else alone)

    want = VOCABULARY[EMBED].value * 2
    torch.testing.assert_close(sum(embedded), want)
    whole = torch.cat(logits, dim=1)
    if world > 1:
        assert whole.shape[1] == -(-11 // world) * world and not whole[:, 11:].any()
        whole = (whole[:, :11] / 3).tanh() * 3
    torch.testing.assert_close(whole, (x @ VOCABULARY[HEAD].value.T / 3).tanh() * 3)


def test_tied_table_is_held_once() -> None:
    size = 11 * HIDDEN * 4
    spec = vocabulary_spec(tie_embeddings=True)
    tied = loaded(Vocabulary(make_context(), spec), {**VOCABULARY, HEAD: VOCABULARY[EMBED]})
    assert tensor_bytes(tied.held()) == size
    unlike = loaded(Vocabulary(make_context(), spec), VOCABULARY)
    assert tensor_bytes(unlike.held()) == 2 * size
    torch.testing.assert_close(unlike.logits(torch.eye(HIDDEN)), VOCABULARY[HEAD].value.T)


def test_walk_gives_each_layer_once_in_order() -> None:
    ctx = make_context()
    inner = Linear(ctx, (Part("b", 4, slice(0, 4)),), HIDDEN, False)
    outer = gate_up_linear(ctx, "a", HIDDEN, 8, False)
    outer.nested = [inner, (inner, None)]  # type: ignore[attr-defined]
    assert list(walk([outer, inner])) == [outer, inner]
