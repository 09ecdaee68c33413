"""GGUF metadata to ModelSpec, names and row order to Hugging Face's."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.gguf import GGUFFile
from headrace.engine.weights.gguf_names import hf_name, row_order
from headrace.engine.weights.layout import tensor_shapes
from headrace.engine.weights.local import gguf_files
from headrace.engine.weights.source import ModelError
from headrace.engine.weights.sources import open_source, read_spec
from headrace.engine.weights.spec_gguf import spec_from_gguf

LAYERS, HIDDEN, HEADS, KV_HEADS, VOCAB = 6, 64, 4, 2, 96

NORMS = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
LINEARS = {
    "attn_q": (64, HIDDEN),
    "attn_k": (32, HIDDEN),
    "attn_v": (32, HIDDEN),
    "attn_output": (HIDDEN, 64),
    "ffn_gate": (80, HIDDEN),
    "ffn_up": (80, HIDDEN),
    "ffn_down": (HIDDEN, 80),
}
EXTRA = {
    "qwen2": {f"attn_{c}.bias": (n,) for c, n in (("q", 64), ("k", 32), ("v", 32))},
    "qwen3": {"attn_q_norm.weight": (16,), "attn_k_norm.weight": (16,)},
    "gemma2": {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)},
}
EXTRA["gemma3"] = {**EXTRA["gemma2"], **EXTRA["qwen3"]}


def write(
    path: Path,
    arch: str,
    metadata: dict | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
) -> GGUFFile:
    """A tiny complete model of one architecture."""
    writer = gguf.GGUFWriter(str(path), arch)
    values = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": 80,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    for key, value in {**values, **(metadata or {})}.items():
        name = key if key.startswith(("tokenizer.", "general.")) else f"{arch}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
    rng = np.random.default_rng(0)
    every = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        every |= {f"blk.{i}.{n}.weight": s for n, s in {**NORMS, **LINEARS}.items()}
        every |= {f"blk.{i}.{n}": s for n, s in EXTRA.get(arch, {}).items()}
    for name, shape in every.items():
        if name not in without and name not in (tensors or {}):
            writer.add_tensor(name, rng.normal(size=shape).astype(np.float32))
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(str(path))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_every_family_has_the_tensors_its_spec_says(tmp_path, arch):
    """Names and shapes of the source are exactly those of a Hugging Face checkpoint of that spec."""
    write(tmp_path / "m.gguf", arch).close()
    files = gguf_files("m", tmp_path / "m.gguf")
    source = open_source(files)
    assert source.spec == read_spec(files)
    ours = {name: source.get(name).shape for name in source.names()}
    assert ours == tensor_shapes(source.spec)
    with pytest.raises(KeyError):
        source.get("model.layers.99.mlp.up_proj.weight")


def test_plain_fields(tmp_path):
    metadata = {
        "rope.freq_base": 5e5,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
    }
    spec = spec_from_gguf(write(tmp_path / "m.gguf", "llama", metadata))
    assert spec.architecture == "llama"
    assert (spec.layers, spec.hidden, spec.intermediate) == (LAYERS, HIDDEN, 80)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab) == (HEADS, KV_HEADS, 16, VOCAB)
    assert spec.max_position == 128
    assert spec.norm_eps == pytest.approx(1e-6)
    assert spec.ropes[0].theta == 5e5
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2, 7))
    assert (spec.activation, spec.embedding_scale, spec.windows) == ("silu", 1.0, ())
    assert (spec.dtype, spec.scheme) == ("float32", "")


def test_tied_and_untied_heads(tmp_path):
    head = np.ones((VOCAB, HIDDEN), np.float32)
    assert spec_from_gguf(write(tmp_path / "tied.gguf", "llama")).tie_embeddings
    file = write(tmp_path / "own.gguf", "llama", tensors={"output.weight": head})
    assert not spec_from_gguf(file).tie_embeddings
    source = open_source(gguf_files("m", tmp_path / "own.gguf"))
    assert source.get("lm_head.weight").read(torch.float32).eq(1).all()


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_biases_are_seen(tmp_path, arch):
    bias = {f"blk.{i}.attn_output.bias": np.ones(HIDDEN, np.float32) for i in range(LAYERS)}
    spec = spec_from_gguf(write(tmp_path / "m.gguf", arch, tensors=bias))
    assert spec.attention_bias == (arch == "qwen2")
    assert spec.output_bias
    assert not spec.mlp_bias


def test_gemma3_defaults(tmp_path):
    """A file has the base and the window only; the pattern and the local base are the family's."""
    metadata = {
        "rope.freq_base": 1e6,
        "attention.sliding_window": 16,
        "attention.key_length": 16,
        "attention.value_length": 16,
    }
    spec = spec_from_gguf(write(tmp_path / "m.gguf", "gemma3", metadata))
    assert spec.windows == (16, 16, 16, 16, 16, 0)
    assert [spec.rope(i).theta for i in range(LAYERS)] == [1e4] * 5 + [1e6]
    assert (spec.norm_offset, spec.embedding_scale, spec.activation) == (0.0, 8.0, "gelu_tanh")
    assert (spec.attention_softcap, spec.final_softcap, spec.qk_norm) == (0.0, 0.0, True)
    assert spec.attention_scale == 0.0


def test_gemma3_linear_scaling_is_for_global_layers(tmp_path):
    metadata = {
        "attention.sliding_window": 16,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    spec = spec_from_gguf(write(tmp_path / "m.gguf", "gemma3", metadata))
    assert spec.rope(5).scaling == {"rope_type": "linear", "factor": 8.0}
    assert spec.rope(0).scaling == {}
    assert spec.max_position == 128


@pytest.mark.parametrize("pattern", [3, [True, False, True, False, True, False]])
def test_window_pattern_of_the_file(tmp_path, pattern):
    metadata = {"attention.sliding_window": 16, "attention.sliding_window_pattern": pattern}
    spec = spec_from_gguf(write(tmp_path / "m.gguf", "gemma3", metadata))
    expected = (16, 16, 0, 16, 16, 0) if pattern == 3 else (16, 0, 16, 0, 16, 0)
    assert spec.windows == expected


def test_gemma2(tmp_path):
    metadata = {"attention.sliding_window": 32, "attn_logit_softcapping": 40.0}
    spec = spec_from_gguf(write(tmp_path / "m.gguf", "gemma2", metadata))
    assert spec.windows == (32, 0) * 3
    assert (spec.attention_softcap, spec.final_softcap) == (40.0, 30.0)
    assert len(spec.ropes) == 1


def test_yarn(tmp_path):
    metadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
        "rope.scaling.yarn_beta_fast": 16.0,
    }
    spec = spec_from_gguf(write(tmp_path / "m.gguf", "qwen2", metadata))
    assert spec.ropes[0].scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
    }
    assert spec.max_position == 512


def test_longrope(tmp_path):
    metadata = {
        "rope.scaling.original_context_length": 32,
        "rope.scaling.attn_factor": 1.25,
    }
    short, long = (np.linspace(1, top, 8, dtype=np.float32) for top in (2, 9))
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    scaling = (
        spec_from_gguf(write(tmp_path / "m.gguf", "llama", metadata, tensors)).ropes[0].scaling
    )
    assert scaling["short_factor"] == short.tolist()
    assert scaling["long_factor"] == long.tolist()
    assert scaling["attention_factor"] == 1.25
    assert scaling["factor"] == 4.0


def test_rope_freqs_are_llama3_scaling(tmp_path):
    """vllm#7268: the extra tensor loads, is used, and gives the frequencies of the Hugging Face checkpoint."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / expected).numpy().astype(np.float32)
    assert factors[0] == 1 and factors[-1] == pytest.approx(8)
    write(tmp_path / "m.gguf", "llama", tensors={"rope_freqs.weight": factors}).close()
    source = open_source(gguf_files("m", tmp_path / "m.gguf"))
    (rope,) = source.spec.ropes
    torch.testing.assert_close(plain / torch.tensor(rope.factors), expected)
    assert "rope_freqs.weight" not in set(source.names())


def permuted(matrix: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: row i of the first half of a head, then row i of the second."""
    out = []
    for head in np.split(matrix, heads):
        first, second = np.split(head, 2)
        for a, b in zip(first, second, strict=True):
            out += [a, b]
    return np.stack(out)


def test_q_and_k_of_llama_get_their_order_back(tmp_path):
    rng = np.random.default_rng(1)
    q = rng.normal(size=(64, HIDDEN)).astype(np.float32)
    k = rng.normal(size=(32, HIDDEN)).astype(np.float32)
    bias = rng.normal(size=64).astype(np.float32)
    tensors = {
        "blk.0.attn_q.weight": permuted(q, HEADS),
        "blk.0.attn_k.weight": permuted(k, KV_HEADS),
        "blk.0.attn_q.bias": permuted(bias, HEADS),
    }
    write(tmp_path / "m.gguf", "llama", tensors=tensors).close()
    source = open_source(gguf_files("m", tmp_path / "m.gguf"))
    prefix = "model.layers.0.self_attn."
    for name, expected in (("q_proj.weight", q), ("k_proj.weight", k), ("q_proj.bias", bias)):
        stored = source.get(prefix + name)
        assert np.array_equal(stored.read(torch.float32).numpy(), expected)
        # The second of two ranks.
        half = slice(len(expected) // 2, len(expected))
        assert np.array_equal(stored.read(torch.float32, half).numpy(), expected[half])


def test_row_order_touches_nothing_else():
    def spec(arch: str) -> ModelSpec:
        return ModelSpec(arch, 1, 64, 96, 4, 2, 16, 100, 128, 1e-6)

    for name in ("v_proj.weight", "o_proj.weight", "q_norm.weight"):
        assert row_order(spec("llama"), f"model.layers.0.self_attn.{name}") is None
    assert row_order(spec("llama"), "lm_head.weight") is None
    for arch in ("qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3"):
        assert row_order(spec(arch), "model.layers.0.self_attn.q_proj.weight") is None


def test_unknown_names_are_kept():
    """So that the model can say which tensor it has no use for."""
    for name in ("blk.0.ffn_gate_chexps.weight", "blk.0.attn_q.scale", "cls.weight", "odd"):
        assert hf_name("llama", name) == name


@pytest.mark.parametrize(
    ("file_type", "scheme"), [(15, "Q4_K_M"), (3, "Q4_1"), (7, "Q8_0"), (1000, "Q8_0")]
)
def test_scheme_is_what_people_call_it(tmp_path, file_type, scheme):
    raw = gguf.quants.quantize(np.ones((VOCAB, HIDDEN), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    metadata = {
        "llama.block_count": 1,
        "llama.context_length": 8,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": 8,
        "llama.attention.head_count": 4,
        "general.file_type": file_type,
    }
    for key, value in metadata.items():
        writer.add_uint32(key, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    spec = spec_from_gguf(GGUFFile(str(tmp_path / "m.gguf")))
    assert spec.scheme == scheme
    assert spec.dtype == "float32"
    assert spec.kv_heads == 4  # not in the file: as many as heads


@pytest.mark.parametrize(
    ("arch", "metadata", "message"),
    [
        ("falcon", {}, r"falcon is not supported; supported are llama, .*Mixtral files are llama"),
        ("qwen2", {"expert_count": 8, "expert_used_count": 2}, "qwen2 with 8 experts"),
        ("llama", {"expert_count": 8, "expert_used_count": 9}, "9 of them used"),
        (
            "llama",
            {"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 2},
            "expert_gating_func is 2",
        ),
        ("llama", {"attention.head_count_kv": [2, 1, 2, 1, 2, 1]}, "differs between layers"),
        ("llama", {"attention.value_length": 8}, "value_length differs"),
        ("llama", {"rope.scaling.type": "longrope"}, "longrope without its factors"),
        ("llama", {"block_count": "six"}, "llama.block_count is 'six'"),
        (
            "gemma3",
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True]},
            "1 entries for 6 layers",
        ),
    ],
)
def test_refused(tmp_path, arch, metadata, message):
    with pytest.raises(ModelError, match=message):
        spec_from_gguf(write(tmp_path / "m.gguf", arch, metadata))


def test_uniform_lists_are_numbers(tmp_path):
    metadata = {"attention.head_count_kv": [2] * LAYERS, "feed_forward_length": [80] * LAYERS}
    spec = spec_from_gguf(write(tmp_path / "m.gguf", "llama", metadata))
    assert (spec.kv_heads, spec.intermediate) == (2, 80)


def test_a_file_without_embedding_is_no_model(tmp_path):
    file = write(tmp_path / "m.gguf", "llama", without=("token_embd.weight",))
    with pytest.raises(ModelError, match="no token_embd"):
        spec_from_gguf(file)


def test_overrides_are_for_config_json(tmp_path):
    write(tmp_path / "m.gguf", "llama").close()
    with pytest.raises(ModelError, match=r"no config\.json to override"):
        read_spec(gguf_files("m", tmp_path / "m.gguf"), {"rope_theta": 1.0})


@pytest.mark.model
def test_gemma3_file(gemma3_gguf):
    """A real file, as llama.cpp's converter wrote it: spec, and a tensor against the `gguf` package."""
    source = open_source(gguf_files("gemma", gemma3_gguf))
    spec = source.spec
    assert (spec.layers, spec.hidden, spec.head_dim, spec.vocab) == (18, 640, 256, 262144)
    assert spec.windows == (512, 512, 512, 512, 512, 0) * 3
    assert (spec.scheme, spec.max_position, spec.tie_embeddings) == ("Q4_K_M", 32768, True)
    assert {n: source.get(n).shape for n in source.names()} == tensor_shapes(spec)
    with GGUFFile(str(gemma3_gguf)) as file:
        stored = file.tensors["blk.3.ffn_down.weight"]
        raw = np.frombuffer(file.rows(stored), np.uint8).reshape(640, -1)
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[stored.type.name])
        del raw
    ours = source.get("model.layers.3.mlp.down_proj.weight")
    assert ours.scheme == stored.type.name
    assert np.array_equal(ours.read(torch.float32).numpy(), expected)
