"""config.json of DeepSeek-V2 and V3 to ModelSpec: the published checkpoints' own numbers, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.cli.facts import kv_arithmetic, kv_specs
from headrace.engine.models.registry import model_shape, selection_queries
from headrace.engine.models.spec import LatentSpec, RoutingSpec
from headrace.engine.weights.layout import tensor_shapes
from headrace.engine.weights.source import ModelError
from headrace.engine.weights.spec_hf import spec_from_hf

YARN = {
    "type": "yarn",
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
}
SIZES = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "moe_layer_freq": 1,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
}
LITE: dict[str, Any] = {
    **SIZES,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}
V2 = {
    **LITE,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 160,
    "n_group": 8,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0,
}
V3 = {
    **SIZES,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize(
    ("config", "q_rank", "routing", "billions"),
    [
        (LITE, 0, RoutingSpec(), 15.7),
        (V2, 1536, RoutingSpec("softmax", 8, 3, False, 16.0), 235.7),
        (V3, 1536, RoutingSpec("sigmoid", 8, 4, True, 2.5), 671.0),
    ],
)
def test_published_configs(
    config: dict[str, Any], q_rank: int, routing: RoutingSpec, billions: float
) -> None:
    spec = spec_from_hf(config)
    assert spec.latent == LatentSpec(512, q_rank, 128, 64, 128)
    assert spec.routing == routing and not spec.shared_gate
    assert spec.max_position == 163840
    assert spec.dense_layers == tuple(range(config["first_k_dense_replace"]))
    assert (spec.ropes[0].rotary_dim, spec.ropes[0].interleaved) == (64, True)
    mscale = 0.1 * config["rope_scaling"]["mscale_all_dim"] * math.log(40) + 1
    assert spec.attention_scale == pytest.approx(192**-0.5 * mscale**2)
    counted = sum(math.prod(shape) for shape in tensor_shapes(spec).values())
    assert counted / 1e9 == pytest.approx(billions, abs=0.1)
    assert model_shape(spec).parameters == counted


@pytest.mark.parametrize("world", [1, 8])
def test_every_rank_holds_one_row_a_token(world: int) -> None:
    spec = spec_from_hf(LITE)
    rows = kv_specs(spec, "bfloat16", world)
    assert [row.bytes_per_token(2) for row in rows] == [1152] * 27
    assert kv_arithmetic(spec, "bfloat16", world) == (
        "30.4 KiB a token = 27 layers x one row for all heads x 576 x 2 bytes (bfloat16)"
    )
    asked = [q for op, q in selection_queries(spec, "bfloat16", world=world) if "attention" in op]
    assert [(q.q_heads, q.kv_heads, q.head_dim, q.v_head_dim, q.latent) for q in asked] == [
        (16 // world, 1, 576, 512, True)
    ]


def test_defaults_are_those_of_transformers() -> None:
    import transformers

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
    sizes |= {"intermediate_size": 96, "num_experts_per_tok": 6, "num_key_value_heads": 4}
    for family, kind in (
        ("deepseek_v2", transformers.DeepseekV2Config),
        ("deepseek_v3", transformers.DeepseekV3Config),
    ):
        bare = spec_from_hf({"model_type": family, **sizes})
        assert bare == spec_from_hf({**kind(**sizes).to_dict(), "dtype": "float32"})


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (V3, {"scoring_func": "softmax"}, "softmax with topk_method noaux_tc is not supported"),
        (V2, {"topk_method": "noaux_tc"}, "supported: softmax with greedy, softmax with group"),
        (V2, {"n_group": 7}, "6 of 160 experts cannot come from 3 of 7 groups"),
        (V2, {"topk_group": 9}, "from 9 of 8 groups"),
        (V3, {"n_group": None}, "n_group is None"),
        (LITE, {"norm_topk_prob": True}, "norm_topk_prob"),
        (LITE, {"attention_bias": True}, "attention_bias is not supported for deepseek_v2"),
        (LITE, {"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be a positive integer"),
        (V3, {"quantization_config": {"quant_method": "fp8"}}, "quantized with fp8"),
    ],
)
def test_refused(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_hf({**config, **changes})
