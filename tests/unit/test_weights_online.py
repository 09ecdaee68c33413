"""Quantization at load: which matrices, which type, and what the blocks hold."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from headrace.engine.config.settings import ModelSettings
from headrace.engine.weights.encode import EncodedTensor, encode, encoded, row_bytes
from headrace.engine.weights.online import (
    keeps_blocks,
    left_float,
    online_schemes,
    refuse_without_kernel,
)
from headrace.engine.weights.source import ModelError
from headrace.platforms.queries import EmbeddingQuery, LinearQuery
from tests.engine.model_harness import StateHandle

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHAPES = {
    EMBED: (99, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.q_proj.bias": (64,),
    "model.layers.0.mlp.down_proj.weight": (64, 80),
    "model.layers.0.mlp.gate.weight": (4, 64),
    "model.norm.weight": (64,),
}


def decoded(raw: np.ndarray, scheme: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[scheme]))


def error(values: torch.Tensor, raw: np.ndarray, scheme: str) -> float:
    return float(((decoded(raw, scheme) - values) ** 2).mean() / (values**2).mean())


@pytest.mark.parametrize(("scheme", "share"), [("Q8_0", 1.01), ("Q4_0", 0.93)])
def test_no_worse_than_the_gguf_package(scheme, share):
    """Q4_0 searches its scale: a tenth less squared error on normal weights."""
    values = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    plain = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[scheme])
    raw = encode(values, scheme)
    assert raw.shape == (40, row_bytes(scheme, 256)) == plain.shape
    assert error(values, raw, scheme) <= share * error(values, plain, scheme)


@pytest.mark.parametrize("scheme", ["Q8_0", "Q4_0"])
def test_odd_blocks(scheme):
    values = torch.zeros(5, 32)
    values[1] = 1e-12  # below what an fp16 scale can hold
    values[2, 7] = -3.0
    values[3, 31] = 3.0
    values[4] = 0.25
    got = decoded(encode(values, scheme), scheme)
    assert got.isfinite().all() and (got[:2] == 0).all()
    assert torch.allclose(got[2:], values[2:], atol=1e-2)


@pytest.mark.parametrize("scheme", ["Q8_0", "Q4_0"])
def test_rows_of_a_handle(scheme):
    values = torch.randn(7000, 32, generator=torch.Generator().manual_seed(1))  # more than a chunk
    handle = EncodedTensor(StateHandle("w", values.bfloat16()), scheme)
    whole = handle.blocks()
    assert np.array_equal(whole, encode(values.bfloat16().float(), scheme))
    assert np.array_equal(handle.blocks(slice(5, 4999)), whole[5:4999])
    assert torch.equal(handle.read(torch.bfloat16), values.bfloat16())


def test_only_what_is_stored_otherwise_is_encoded():
    handles = {name: StateHandle(name, torch.zeros(4, 32)) for name in ("a", "b")}
    made = encoded(handles, {"a": "Q4_0", "b": "float32"})
    assert made["b"] is handles["b"] and made["a"].scheme == "Q4_0"


def test_types():
    assert online_schemes(SHAPES, {}, "q4") == {
        EMBED: "Q8_0",
        HEAD: "Q8_0",
        "model.layers.0.self_attn.q_proj.weight": "Q4_0",
    }
    assert set(online_schemes(SHAPES, {}, "int8").values()) == {"Q8_0"}
    assert online_schemes(SHAPES, {EMBED: "Q6_K"}, "") == {EMBED: "Q6_K"}
    assert online_schemes(SHAPES, {EMBED: "Q6_K"}, "int8")[EMBED] == "Q6_K"
    assert left_float(SHAPES, online_schemes(SHAPES, {}, "q4")) == [
        "model.layers.0.mlp.down_proj.weight",  # 80 columns
        "model.layers.0.mlp.gate.weight",
    ]


def test_nothing_to_quantize_is_refused():
    stored = dict.fromkeys(SHAPES, "Q4_K")
    with pytest.raises(ModelError, match="nothing to do"):
        online_schemes(SHAPES, stored, "int8")


def test_no_kernel_is_refused():
    queries = [LinearQuery(64, 64, "bfloat16"), EmbeddingQuery(99, 64, "bfloat16", "Q8_0")]
    with pytest.raises(ModelError, match=r"--quantization q4 has no kernel.* on cpu:0"):
        refuse_without_kernel("q4", queries, "cpu:0")
    refuse_without_kernel("", queries, "cpu:0")
    refuse_without_kernel("q4", [LinearQuery(64, 64, "bfloat16", "Q4_0")], "cpu:0")


@pytest.mark.parametrize(
    ("weights", "quantization", "dtype", "kept"),
    [
        ("auto", "", "bfloat16", True),
        ("auto", "", "float32", False),
        ("auto", "int8", "float32", True),
        ("blocks", "", "float32", True),
        ("dequantized", "int8", "bfloat16", False),
    ],
)
def test_when_stored_blocks_are_kept(weights, quantization, dtype, kept):
    settings = ModelSettings(weights=weights, quantization=quantization)
    assert keeps_blocks(settings, dtype, "bfloat16") is kept
