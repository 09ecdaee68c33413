"""Tiny random models of every family, made and saved by transformers: the truth the native models are held to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.engine.weights.spec_hf import spec_from_hf
from tests.engine.model_harness import StateSource

VOCAB = 99
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
}


def _scaled(max_position: int, **rope: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "max_position_embeddings": max_position,
        "rope_scaling": {"rope_theta": 10000.0, **rope},
    }


_MOE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
_LATENT = {
    **_MOE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}
_YARN = {
    "rope_theta": 10000.0,
    "rope_type": "yarn",
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
    "original_max_position_embeddings": 64,
}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 16}

# name -> what the config has beyond _SIZES
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-mha": {"model_type": "llama", "num_key_value_heads": 6, "head_dim": 16},
    "llama-8-heads": {"model_type": "llama", "num_attention_heads": 8, "head_dim": 16},
    "llama-linear": _scaled(64, rope_type="linear", factor=4.0),
    "llama-dynamic": _scaled(64, rope_type="dynamic", factor=4.0),
    "llama-llama3": _scaled(512, **_LLAMA3),
    "llama-yarn": _scaled(64, rope_type="yarn", factor=4.0),
    "llama-yarn-mscale": _scaled(
        256,
        rope_type="yarn",
        factor=8.0,
        mscale=0.7,
        mscale_all_dim=1.3,
        beta_fast=16,
        beta_slow=2,
        truncate=False,
        original_max_position_embeddings=32,
    ),
    "llama-longrope": _scaled(256, **_LONG),
    "mistral": {"model_type": "mistral", "sliding_window": 16},
    "mistral-full": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-windowed": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "mixtral": {"model_type": "mixtral", **_MOE, "sliding_window": 16},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **_MOE,
        "num_experts": 8,
        "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_MOE,
        "num_experts": 8,
        "head_dim": 16,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **_LATENT,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "rope_scaling": _YARN,
    },
    "deepseek_v2-dense": {
        "model_type": "deepseek_v2",
        **_LATENT,
        "q_lora_rank": 40,
        "first_k_dense_replace": 3,
    },
    "deepseek_v2-groups": {
        "model_type": "deepseek_v2",
        **_LATENT,
        "q_lora_rank": 40,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_LATENT,
        "q_lora_rank": 40,
        "n_group": 4,
        "topk_group": 2,
        "rope_scaling": _YARN,
    },
    "gemma2": {"model_type": "gemma2", **_GEMMA, "attn_logit_softcapping": 2.0},
    "gemma3": {
        "model_type": "gemma3_text",
        **_GEMMA,
        "sliding_window_pattern": 3,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}


@dataclass
class Tiny:
    """A saved model: transformers' own instance in float32, and what its folder holds."""

    name: str
    truth: Any
    source: StateSource

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 [tokens, vocab], all positions, without a cache."""
        result: torch.Tensor = self.truth(torch.tensor([tokens])).logits[0].float()
        return result


def make_tiny(name: str, folder: Path) -> Tiny:
    settings = {**_SIZES, **CONFIGS[name]}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(sum(name.encode()))
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float32,
        attn_implementation="eager",  # the only one with soft caps
    ).eval()
    with torch.no_grad():
        # Weights large enough that attention, soft caps and positions all matter to the result.
        for key, value in model.named_parameters():
            value.copy_(torch.randn_like(value) * (0.3 if "norm" in key or "bias" in key else 0.15))
            if key.endswith("norm.weight") and "gemma" not in name:
                value.add_(1.0)
        for key, value in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                value.copy_(torch.randn_like(value) * 0.2)
    model.save_pretrained(folder)
    spec = spec_from_hf(json.loads((folder / "config.json").read_text()))
    return Tiny(name, model, StateSource(spec, load_file(folder / "model.safetensors")))


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(1, VOCAB, (length,), generator=generator).tolist()
