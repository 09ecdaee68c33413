"""Rotary tables against transformers' own formulas, for every kind of scaling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.engine.layers.rotary import cos_sin_table, inverse_frequencies
from headrace.engine.models.spec import RopeSpec
from headrace.engine.weights.source import ModelError
from headrace.engine.weights.spec_hf import spec_from_hf

DIM = 64
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: list[tuple[str, int, dict[str, Any]]] = [
    ("linear", 2048, {"factor": 4.0}),
    ("dynamic", 2048, {"factor": 2.0}),
    ("llama3", 131072, {"factor": 8.0, "original_max_position_embeddings": 8192, **LLAMA3}),
    ("llama3", 8192, {"factor": 32.0, "original_max_position_embeddings": 1024, **LLAMA3}),
    ("yarn", 32768, {"factor": 4.0, "original_max_position_embeddings": 8192}),
    ("yarn", 4096, {"factor": 16.0, "beta_fast": 20, "beta_slow": 3, "truncate": False}),
    ("yarn", 4096, {"factor": 16.0, "mscale": 0.7, "mscale_all_dim": 1.1}),
    ("yarn", 4096, {"factor": 16.0, "attention_factor": 1.5}),
    (
        "longrope",
        131072,
        {
            "short_factor": [1 + i / 100 for i in range(DIM // 2)],
            "long_factor": [1 + i for i in range(DIM // 2)],
            "original_max_position_embeddings": 4096,
        },
    ),
]


def both(kind: str, trained: int, scaling: dict[str, Any]) -> tuple[Any, RopeSpec]:
    config = LlamaConfig(
        hidden_size=DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=trained,
        rope_parameters={"rope_type": kind, "rope_theta": 500000.0, **scaling},
    )
    return config, spec_from_hf(config.to_dict()).ropes[0]


@pytest.mark.parametrize(("kind", "trained", "scaling"), SCALINGS)
@pytest.mark.parametrize("length", [100, 200_000])
def test_scalings(kind: str, trained: int, scaling: dict[str, Any], length: int) -> None:
    config, rope = both(kind, trained, scaling)
    want, want_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    got, factor = inverse_frequencies(rope, DIM, length)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    assert factor == pytest.approx(want_factor)


def test_table_holds_cosines_then_sines_times_the_attention_factor() -> None:
    rope = RopeSpec(
        scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 2.0,
        }
    )
    frequencies, _ = inverse_frequencies(rope, 16, 50)
    table = cos_sin_table(rope, 16, 50)
    assert table.shape == (50, 16) and table.dtype == torch.float32
    for position in (0, 1, 49):
        for i in range(8):
            angle = position * float(frequencies[i])
            assert float(table[position, i]) == pytest.approx(2 * math.cos(angle), abs=1e-5)
            assert float(table[position, 8 + i]) == pytest.approx(2 * math.sin(angle), abs=1e-5)


def test_factors_of_the_file_are_llama3_scaling() -> None:
    """A GGUF file stores the factors that llama3 scaling divides frequencies by (rope_freqs.weight)."""
    _, scaled = both(*SCALINGS[2])
    want, _ = inverse_frequencies(scaled, DIM, 100)
    plain, _ = inverse_frequencies(RopeSpec(500000.0), DIM, 100)
    stored = RopeSpec(500000.0, factors=tuple((plain / want).tolist()))
    got, factor = inverse_frequencies(stored, DIM, 100)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert factor == 1.0


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (RopeSpec(factors=(1.0, 1.0)), "2 rope factors for 8"),
        (RopeSpec(scaling={"rope_type": "spiral"}), "'spiral' is not supported; known: default"),
        (RopeSpec(scaling={"rope_type": "linear"}), "lacks 'factor'"),
        (
            RopeSpec(
                scaling={
                    "rope_type": "longrope",
                    "factor": 2.0,
                    "original_max_position_embeddings": 8,
                    "short_factor": [1.0],
                }
            ),
            "needs 8 numbers in 'short_factor', it has 1",
        ),
    ],
)
def test_what_cannot_be_computed_is_said(rope: RopeSpec, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        inverse_frequencies(rope, 16, 4)
