"""What a config.json of the DeepSeek-V2 and V3 families has beyond others: latent attention and how experts are chosen.

Torch-free. Sources: the transformers library and the configs of the published checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.engine.models.spec import LatentSpec, ModelSpec, RoutingSpec
from headrace.engine.weights.source import ModelError

Config = Mapping[str, Any]

DEEPSEEK = ("deepseek_v2", "deepseek_v3")
DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "rope_interleave": True,
}
V2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 102400,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
}
V3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 129280,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
# (scoring_func, topk_method) that each family is known to have
_METHODS = {
    "deepseek_v2": (("softmax", "greedy"), ("softmax", "group_limited_greedy")),
    "deepseek_v3": (("sigmoid", "noaux_tc"),),
}


def deepseek(spec: ModelSpec, c: Config) -> ModelSpec:
    """`spec` with what the config `c`, completed with the family's defaults, says of latent attention and experts."""
    for key in ("attention_bias", "mlp_bias"):
        if c.get(key):
            raise ModelError(f"config.json: {key} is not supported for {spec.architecture}")
    latent = LatentSpec(
        kv_rank=_size(c, "kv_lora_rank"),
        q_rank=_size(c, "q_lora_rank") if c["q_lora_rank"] is not None else 0,
        nope_dim=_size(c, "qk_nope_head_dim"),
        rope_dim=_size(c, "qk_rope_head_dim"),
        v_dim=_size(c, "v_head_dim"),
    )
    interleaved = spec.architecture == "deepseek_v2" or bool(c["rope_interleave"])
    rope = replace(spec.ropes[0], rotary_dim=latent.rope_dim, interleaved=interleaved)
    scaling, scale = rope.scaling, (latent.nope_dim + latent.rope_dim) ** -0.5
    # scores of a longer context are sharpened, beside what the scaled rope itself does
    if scaling.get("mscale_all_dim") and scaling["factor"] > 1:
        scale *= (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0) ** 2
    return replace(
        spec,
        **_experts(spec, c),
        latent=latent,
        kv_heads=1,
        head_dim=latent.kv_rank + latent.rope_dim,
        attention_scale=scale,
        ropes=(rope,),
    )


def _experts(spec: ModelSpec, c: Config) -> dict[str, Any]:
    experts, chosen = _size(c, "n_routed_experts"), _size(c, "num_experts_per_tok")
    size, first = _size(c, "moe_intermediate_size"), c["first_k_dense_replace"] or 0
    step, shared = c["moe_layer_freq"] or 1, c["n_shared_experts"] or 0
    method = (c["scoring_func"], c["topk_method"])
    if method not in _METHODS[spec.architecture]:
        known = ", ".join(" with ".join(names) for names in _METHODS[spec.architecture])
        raise ModelError(
            f"config.json: scoring_func {method[0]} with topk_method {method[1]} is not supported for "
            f"{spec.architecture}; supported: {known}"
        )
    if spec.architecture == "deepseek_v2" and c["norm_topk_prob"]:
        raise ModelError(
            "config.json: norm_topk_prob of a deepseek_v2 is not supported: other engines do not agree on it"
        )
    groups = 1 if method[1] == "greedy" else _size(c, "n_group")
    kept = 1 if groups == 1 else _size(c, "topk_group")
    if experts % groups or kept > groups or chosen > kept * (experts // groups):
        raise ModelError(
            f"config.json: {chosen} of {experts} experts cannot come from {kept} of {groups} groups"
        )
    bias = method[1] == "noaux_tc"
    scale = float(c["routed_scaling_factor"])
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "moe_intermediate": size,
        "shared_intermediate": size * shared,
        "shared_gate": False,
        "norm_topk_prob": bool(c["norm_topk_prob"]),
        "dense_layers": tuple(i for i in range(spec.layers) if i < first or i % step),
        "routing": RoutingSpec(method[0], groups, kept, bias, scale),
    }


def _size(c: Config, key: str) -> int:
    value = c.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}; it must be a positive integer")
    return value
