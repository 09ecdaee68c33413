"""config.json to ModelSpec, held to transformers' own reading of the same config."""

from __future__ import annotations

import json

import pytest
import transformers
from transformers.masking_utils import sliding_window_overlay

from headrace.engine.weights.source import ModelError
from headrace.engine.weights.spec_hf import spec_from_hf

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}
CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "mixtral": transformers.MixtralConfig,
    "qwen2_moe": transformers.Qwen2MoeConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "gemma2": transformers.Gemma2Config,
    "gemma3": transformers.Gemma3TextConfig,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def saved(family: str, **options) -> dict:
    """The config.json that transformers writes, as it is read back."""
    config = CLASSES[family](**{**TINY, **options})
    return json.loads(config.to_json_string(use_diff=False))


def old_style(family: str, **options) -> dict:
    """A config.json as it was written before transformers 5, with only what differs from the defaults."""
    kind = "gemma3_text" if family == "gemma3" else family
    return {"model_type": kind, **TINY, **options}


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("options", [{}, {"head_dim": 32}, {"rms_norm_eps": 1e-5}])
def test_plain_fields(family, options):
    theirs = CLASSES[family](**{**TINY, **options})
    for config in (saved(family, **options), old_style(family, **options)):
        spec = spec_from_hf(config)
        assert spec.architecture == family
        assert (spec.layers, spec.hidden, spec.intermediate) == (8, 64, 96)
        assert (spec.heads, spec.kv_heads, spec.vocab, spec.max_position) == (4, 2, 100, 256)
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // 4
        assert spec.head_dim == head_dim
        assert spec.norm_eps == theirs.rms_norm_eps
        assert spec.tie_embeddings == theirs.tie_word_embeddings
        assert spec.bos_token_id == theirs.bos_token_id
        eos = theirs.eos_token_id
        assert spec.eos_token_ids == (() if eos is None else (eos,))


WINDOWS = [
    {},
    {"sliding_window": 16},
    {"sliding_window": None},
    {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},
    {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 3},
    {
        "sliding_window": 16,
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"] * 4,
    },
]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (family, options)
        for family in CLASSES
        for options in WINDOWS
        if not (family.startswith("gemma") and options.get("sliding_window", 1) is None)
    ],
)
def test_windows(family, options):
    theirs = CLASSES[family](**{**TINY, **options})
    if family in ("mistral", "mixtral", "qwen3_moe"):  # layer_types mean nothing to them
        expected = [theirs.sliding_window or 0] * 8
    elif family == "llama":
        expected = [0] * 8
    else:
        kinds = theirs.layer_types if theirs.sliding_window else ["full_attention"] * 8
        expected = [theirs.sliding_window if k == "sliding_attention" else 0 for k in kinds]
    for config in (saved(family, **options), old_style(family, **options)):
        spec = spec_from_hf(config)
        assert [spec.window(i) for i in range(8)] == expected


def test_a_window_of_w_shows_w_keys():
    """The meaning of ModelSpec.windows, in transformers' masks (all families share this overlay)."""
    visible = sliding_window_overlay(4)
    assert [key for key in range(11) if key <= 10 and visible(0, 0, 10, key)] == [7, 8, 9, 10]


@pytest.mark.parametrize("pattern", [2, 3, 6])
def test_gemma3_pattern(pattern):
    theirs = CLASSES["gemma3"](**TINY, sliding_window_pattern=pattern, sliding_window=16)
    spec = spec_from_hf(old_style("gemma3", sliding_window_pattern=pattern, sliding_window=16))
    assert [w > 0 for w in spec.windows] == [t == "sliding_attention" for t in theirs.layer_types]


SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    LLAMA3,
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0},
    {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    },
]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
def test_rope_scaling_old_and_new_form(family, scaling):
    options = {"rope_theta": 50000.0, "head_dim": 16}
    new = saved(family, rope_parameters={**scaling, "rope_theta": 50000.0}, head_dim=16)
    old_names = {("type" if k == "rope_type" else k): v for k, v in scaling.items()}
    configs = (
        new,
        old_style(family, rope_scaling=scaling, **options),
        old_style(family, rope_scaling=old_names, **options),
    )
    first = spec_from_hf(configs[0])
    for config in configs:
        spec = spec_from_hf(config)
        assert spec.ropes == first.ropes
        assert spec.max_position == first.max_position
        (rope,) = spec.ropes
        assert rope.theta == 50000.0
        assert scaling.items() <= rope.scaling.items()
        if scaling["rope_type"] != "linear":
            expected = scaling.get("original_max_position_embeddings", 256)
            assert rope.scaling["original_max_position_embeddings"] == expected


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (SCALINGS[0], 1024),
        (SCALINGS[1], 512),
        (LLAMA3, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        (SCALINGS[5], 256),
    ],
)
def test_context_counts_the_scaling(scaling, context):
    assert spec_from_hf(old_style("llama", rope_scaling=scaling)).max_position == context


def test_longrope_factor_from_the_lengths():
    spec = spec_from_hf(old_style("llama", rope_scaling=SCALINGS[5]))
    assert spec.ropes[0].scaling["factor"] == 4.0


@pytest.mark.parametrize("form", ["old", "new"])
def test_gemma3_has_two_ropes(form):
    scaling = {"rope_type": "linear", "factor": 8.0}
    if form == "old":
        config = old_style(
            "gemma3", rope_theta=1e6, rope_local_base_freq=20000.0, rope_scaling=scaling
        )
    else:
        config = saved(
            "gemma3",
            rope_parameters={
                "full_attention": {**scaling, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
            },
        )
    spec = spec_from_hf(config)
    assert spec.rope(5).theta == 1e6
    assert spec.rope(5).scaling == scaling
    assert spec.rope(0).theta == 20000.0
    assert spec.rope(0).scaling == {}
    assert spec.max_position == 256  # Gemma counts the scaling already


def test_gemma3_defaults_of_the_ropes():
    spec = spec_from_hf(old_style("gemma3"))
    assert (spec.rope(5).theta, spec.rope(0).theta) == (1e6, 1e4)


def test_partial_rotary_factor():
    spec = spec_from_hf(old_style("llama", head_dim=32, partial_rotary_factor=0.5))
    assert spec.ropes[0].rotary_dim == 16
    assert spec_from_hf(old_style("llama")).ropes[0].rotary_dim == 0


def test_biases_and_norms():
    def flags(family, **options):
        spec = spec_from_hf(old_style(family, **options))
        return (spec.attention_bias, spec.output_bias, spec.mlp_bias, spec.qk_norm)

    assert flags("llama") == (False, False, False, False)
    assert flags("llama", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert flags("mistral", attention_bias=True) == (False, False, False, False)
    assert flags("qwen2") == (True, False, False, False)
    assert flags("qwen3") == (False, False, False, True)
    assert flags("qwen3", attention_bias=True) == (True, True, False, True)
    assert flags("mixtral", attention_bias=True) == (False, False, False, False)
    assert flags("qwen2_moe", attention_bias=True) == (True, False, False, False)
    assert flags("qwen2_moe", qkv_bias=False) == (False, False, False, False)
    assert flags("qwen3_moe", attention_bias=True) == (True, True, False, True)
    assert flags("gemma2") == (False, False, False, False)
    assert flags("gemma3") == (False, False, False, True)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    "options",
    [{}, {"norm_topk_prob": True}, {"decoder_sparse_step": 3}, {"mlp_only_layers": [0, 7]}],
)
def test_experts(family, options):
    mixtral = family == "mixtral"
    theirs = CLASSES[family](**TINY, **({} if mixtral else options))
    for config in (saved(family, **options), old_style(family, **options)):
        spec = spec_from_hf(config)
        assert spec.experts == getattr(theirs, "num_local_experts", None) or theirs.num_experts
        assert spec.experts_per_token == theirs.num_experts_per_tok
        width = theirs.intermediate_size if mixtral else theirs.moe_intermediate_size
        assert spec.moe_intermediate == width
        assert spec.shared_intermediate == getattr(theirs, "shared_expert_intermediate_size", 0)
        assert spec.norm_topk_prob == (mixtral or theirs.norm_topk_prob)
        dense = {} if mixtral else options
        step, only = dense.get("decoder_sparse_step", 1), dense.get("mlp_only_layers", [])
        sparse = [i not in only and (i + 1) % step == 0 for i in range(8)]
        assert [spec.sparse(i) for i in range(8)] == sparse


def test_gemma_extras():
    two = spec_from_hf(old_style("gemma2", query_pre_attn_scalar=144))
    assert two.attention_scale == 144**-0.5
    assert (two.attention_softcap, two.final_softcap) == (50.0, 30.0)
    assert (two.embedding_scale, two.norm_offset, two.activation) == (8.0, 1.0, "gelu_tanh")
    three = spec_from_hf(old_style("gemma3"))
    assert (three.attention_softcap, three.final_softcap) == (0.0, 0.0)
    assert three.attention_scale == 256**-0.5


def test_multimodal_gemma3_gives_its_text_model():
    """The config.json of google/gemma-3-4b-it leaves most of text_config to the defaults."""
    spec = spec_from_hf(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "torch_dtype": "bfloat16",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab) == (8, 4, 256, 262208)
    assert spec.max_position == 131072
    assert spec.windows[:6] == (1024, 1024, 1024, 1024, 1024, 0)
    assert spec.eos_token_ids == (1, 106)
    assert spec.dtype == "bfloat16"
    assert spec.tie_embeddings


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_names(key):
    assert spec_from_hf(old_style("llama", **{key: "float16"})).dtype == "float16"
    assert spec_from_hf(old_style("llama", **{key: "torch.bfloat16"})).dtype == "bfloat16"


# What is refused, in one sentence.


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors"])
def test_quantized_checkpoints(method):
    config = old_style("llama", quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ModelError, match=f"quantized with {method}, which is not supported.*GGUF"):
        spec_from_hf(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "falcon"}, r"falcon is not supported; supported are llama, .*gemma3"),
        ({}, "no model_type"),
        (old_style("llama", architectures=["LlamaForSequenceClassification"]), "generate text"),
        (old_style("gemma3", use_bidirectional_attention=True), "embedding model"),
        (old_style("llama", hidden_act="relu6"), "activation relu6"),
        (old_style("llama", hidden_size=None), "hidden_size is None"),
        (old_style("llama", num_hidden_layers="8"), "num_hidden_layers is '8'"),
        (old_style("llama", num_key_value_heads=3), "no multiple"),
        (old_style("llama", rope_scaling={"rope_type": "alibi"}), "rope type alibi"),
        (old_style("llama", rope_scaling={"rope_type": "linear"}), "linear needs factor"),
        (old_style("llama", rope_scaling={"type": "llama3", "factor": 8.0}), "low_freq_factor"),
        (
            old_style(
                "llama",
                rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
            ),
            "short_factor has 1 entries; it needs 8",
        ),
        (old_style("gemma3", layer_types=["full_attention"]), "1 entries"),
        (old_style("qwen3", layer_types=["linear_attention"] * 8), "linear_attention"),
    ],
)
def test_refused(config, message):
    with pytest.raises(ModelError, match=message) as caught:
        spec_from_hf(config)
    assert "\n" not in str(caught.value)
