"""ModelSpec from a Hugging Face config.json. Torch-free.

Conventions are those of the transformers library, checked against its source: a sliding window of W shows a token W
keys, itself included, in every family; keys a config leaves out have the family's defaults (a Gemma 3 config on the
hub leaves out most of them); `rope_scaling` (old) wins over `rope_parameters` (new) where both are given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.engine.models.spec import ModelSpec, RopeSpec
from headrace.engine.weights.deepseek import DEEPSEEK, DEFAULTS, V2_DEFAULTS, V3_DEFAULTS, deepseek
from headrace.engine.weights.source import ModelError

Config = Mapping[str, Any]

_COMMON = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
_GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_MISTRAL = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
}
_QWEN = {
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# What a family's config means when it leaves a key out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral": {**_MISTRAL, "sliding_window": 4096},
    "qwen2": {**_QWEN, "num_key_value_heads": 32},
    "qwen3": {**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
    "mixtral": {
        **_MISTRAL,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        **_QWEN,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        **_QWEN,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "deepseek_v2": {**DEFAULTS, **V2_DEFAULTS},
    "deepseek_v3": {**DEFAULTS, **V3_DEFAULTS},
    "gemma2": {
        **_GEMMA,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3": {
        **_GEMMA,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
}
FAMILIES = tuple(_DEFAULTS)
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_QWEN2 = ("qwen2", "qwen2_moe")
_DTYPES = ("float32", "bfloat16", "float16")


def spec_from_hf(config: Config) -> ModelSpec:
    """The spec a config.json describes; a multimodal Gemma 3 gives its text model.

    Raises ModelError for an unknown architecture, a quantized checkpoint, and anything this engine would compute
    wrongly.
    """
    family, c = _family(config)
    refuse_quantized(config)
    layers, hidden = _integer(c, "num_hidden_layers"), _integer(c, "hidden_size")
    heads = _integer(c, "num_attention_heads")
    kv_heads = c.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads ({heads}) is no multiple of num_key_value_heads ({kv_heads})"
        )
    # latent attention turns a part of each head only, of a size of its own
    head_dim = c.get("qk_rope_head_dim") or c.get("head_dim") or hidden // heads
    types = _layer_types(family, c, layers)
    window = (c.get("sliding_window") or 0) if _SLIDING in types else 0
    ropes, rope_of_layer = _ropes(family, c, types, head_dim)
    gemma = family in ("gemma2", "gemma3")
    spec = ModelSpec(
        architecture=family,
        layers=layers,
        hidden=hidden,
        intermediate=_integer(c, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=_integer(c, "vocab_size"),
        max_position=_max_position(family, c, ropes[0]),
        norm_eps=float(c["rms_norm_eps"]),
        activation=_activation(c),
        tie_embeddings=bool(c["tie_word_embeddings"]),
        attention_bias=_bias(family, c) or (family in _QWEN2 and bool(c.get("qkv_bias", True))),
        output_bias=_bias(family, c),
        mlp_bias=family == "llama" and bool(c.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3"),
        **_experts(family, c, layers),
        norm_offset=1.0 if gemma else 0.0,
        windows=tuple(window if t == _SLIDING else 0 for t in types) if window else (),
        ropes=ropes,
        rope_of_layer=rope_of_layer,
        attention_scale=float(c["query_pre_attn_scalar"]) ** -0.5 if gemma else 0.0,
        attention_softcap=float(c.get("attn_logit_softcapping") or 0)
        if family == "gemma2"
        else 0.0,
        final_softcap=float(c.get("final_logit_softcapping") or 0) if gemma else 0.0,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        dtype=_dtype({**config, **c}),
        bos_token_id=c.get("bos_token_id"),
        eos_token_ids=token_ids(config.get("eos_token_id", c.get("eos_token_id"))),
    )
    return deepseek(spec, c) if family in DEEPSEEK else spec


def token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` as configs write it (a number, a list, null) as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def refuse_quantized(config: Config) -> None:
    """ModelError for checkpoints of a quantization library (their weights are not plain tensors)."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return
    method = quantization.get("quant_method", "an unknown method")
    raise ModelError(
        f"this checkpoint is quantized with {method}, which is not supported; use the original float16 or bfloat16 "
        "checkpoint, or a GGUF file (Q4_0 to Q8_0, Q2_K to Q6_K)"
    )


def _family(config: Config) -> tuple[str, dict[str, Any]]:
    """The family, and the (text) config completed with the family's defaults."""
    kind = config.get("model_type", "")
    text = config.get("text_config")
    inner: Config = text if isinstance(text, Mapping) else config
    known = {**{name: name for name in FAMILIES}, "gemma3_text": "gemma3"}
    family = known.get(kind)
    if family is None or (inner is not config and family != "gemma3"):
        raise ModelError(
            f"config.json: the architecture {kind or '(no model_type)'} is not supported; "
            f"supported are {', '.join(FAMILIES)}"
        )
    for name in config.get("architectures") or ():
        if not name.endswith(("ForCausalLM", "ForConditionalGeneration")):
            raise ModelError(
                f"config.json: {name} does not generate text; use a model of the kind ...ForCausalLM"
            )
    if inner.get("use_bidirectional_attention"):
        raise ModelError(
            "config.json: use_bidirectional_attention is set; this is an embedding model, which is not supported"
        )
    return family, {**_COMMON, **_DEFAULTS[family], **inner}


def _integer(c: Config, key: str) -> int:
    value = c.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}; it must be a positive integer")
    return value


def _bias(family: str, c: Config) -> bool:
    """`attention_bias` covers q, k, v and o; Qwen 2 has its own on q, k, v and Mistral none."""
    return family not in (*_QWEN2, "mistral", "mixtral") and bool(c["attention_bias"])


def _experts(family: str, c: Config, layers: int) -> dict[str, Any]:
    """The spec's fields about experts; {} for a dense family."""
    if family not in ("mixtral", "qwen2_moe", "qwen3_moe"):
        return {}
    mixtral = family == "mixtral"
    key = "num_local_experts" if "num_local_experts" in c else "num_experts"
    experts, chosen = _integer(c, key), _integer(c, "num_experts_per_tok")
    if chosen > experts:
        raise ModelError(f"config.json: num_experts_per_tok {chosen} is more than {key} {experts}")
    step, dense = c.get("decoder_sparse_step") or 1, c.get("mlp_only_layers") or ()
    shared = c["shared_expert_intermediate_size"] if family == "qwen2_moe" else 0
    plain = () if mixtral else tuple(i for i in range(layers) if i in dense or (i + 1) % step)
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "moe_intermediate": _integer(
            c, "intermediate_size" if mixtral else "moe_intermediate_size"
        ),
        "shared_intermediate": shared,
        "norm_topk_prob": mixtral or bool(c.get("norm_topk_prob", False)),
        "dense_layers": plain,
    }


def _activation(c: Config) -> str:
    name = c.get("hidden_activation") or c["hidden_act"]
    if name not in _ACTIVATIONS:
        raise ModelError(
            f"config.json: the activation {name} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _dtype(c: Config) -> str:
    name = str(c.get("dtype") or c.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in _DTYPES else "float32"


def _layer_types(family: str, c: Config, layers: int) -> tuple[str, ...]:
    given = c.get("layer_types")
    if family in ("mistral", "mixtral", "qwen3_moe"):
        windowed = family != "qwen3_moe" or c.get("use_sliding_window")
        return ((_SLIDING if windowed and c.get("sliding_window") else _FULL),) * layers
    if family in ("llama", *DEEPSEEK):
        return (_FULL,) * layers
    if given is not None:
        unknown = sorted(set(given) - {_SLIDING, _FULL})
        if unknown or len(given) != layers:
            raise ModelError(
                f"config.json: layer_types has {len(given)} entries {unknown or ''} for {layers} layers; "
                f"it must say {_SLIDING} or {_FULL} for each layer"
            )
        if family in (*_QWEN2, "qwen3") and not c.get("use_sliding_window"):
            return (_FULL,) * layers
        return tuple(given)
    if family in ("qwen2", "qwen3"):
        first = c["max_window_layers"] if c.get("use_sliding_window") else layers
        return tuple(_SLIDING if i >= first else _FULL for i in range(layers))
    if family == "qwen2_moe":
        last = c["max_window_layers"] if c.get("use_sliding_window") else 0
        return tuple(_FULL if i % 2 or i >= last else _SLIDING for i in range(layers))
    pattern = 2 if family == "gemma2" else c.get("sliding_window_pattern") or 6
    return tuple(_SLIDING if (i + 1) % pattern else _FULL for i in range(layers))


def _ropes(
    family: str, c: Config, types: tuple[str, ...], head_dim: int
) -> tuple[tuple[RopeSpec, ...], tuple[int, ...]]:
    """The distinct ropes, that of full-attention layers first, and the one each layer uses."""
    scaling = c.get("rope_scaling")
    parameters: Config = c.get("rope_parameters") or {}
    if family == "gemma3":
        full = {**(parameters.get(_FULL) or {}), **(scaling or {})}
        local = parameters.get(_SLIDING) or {}
        ropes = (
            _rope(c, full, c["rope_theta"], head_dim),
            _rope(c, local, c["rope_local_base_freq"], head_dim),
        )
        return ropes, tuple(int(t == _SLIDING) for t in types)
    chosen: Config = scaling or parameters
    if _FULL in chosen or _SLIDING in chosen:
        kinds = tuple(sorted(set(types)))
        by_kind = tuple(
            _rope(c, chosen.get(kind) or {}, c["rope_theta"], head_dim) for kind in kinds
        )
        return by_kind, tuple(kinds.index(t) for t in types)
    return (_rope(c, chosen, c["rope_theta"], head_dim),), ()


def _rope(c: Config, given: Config, theta: float, head_dim: int) -> RopeSpec:
    scaling = dict(given)
    kind = scaling.pop("type", None)
    kind = scaling.pop("rope_type", None) or kind or "default"
    if kind == "su":  # an early name
        kind = "longrope"
    if kind not in _ROPE_TYPES:
        raise ModelError(
            f"config.json: the rope type {kind} is not supported; supported are {', '.join(_ROPE_TYPES)}"
        )
    theta = float(scaling.pop("rope_theta", None) or theta)
    partial = scaling.pop("partial_rotary_factor", None) or c.get("partial_rotary_factor") or 1.0
    rotary = int(head_dim * partial)
    spec = RopeSpec(theta=theta, rotary_dim=0 if rotary == head_dim else rotary)
    if kind == "default":
        return spec
    scaling["rope_type"] = kind
    _complete_scaling(c, scaling)
    _check_scaling(scaling, rotary)
    return replace(spec, scaling=scaling)


def _complete_scaling(c: Config, scaling: dict[str, Any]) -> None:
    """Puts into `scaling` what its formula takes from elsewhere in the config."""
    kind, trained = scaling["rope_type"], c["max_position_embeddings"]
    key = "original_max_position_embeddings"
    if kind == "dynamic":  # its formula counts from max_position_embeddings, whatever else is given
        scaling[key] = trained
    elif kind in ("llama3", "yarn", "longrope"):
        scaling[key] = c.get(key) or scaling.get(key) or trained
        if kind != "llama3" and not scaling.get("factor"):
            scaling["factor"] = trained / scaling[key]


def _check_scaling(scaling: Config, rotary: int) -> None:
    kind = scaling["rope_type"]
    needed = {
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "longrope": ("short_factor", "long_factor"),
    }.get(kind, ("factor",))
    missing = [key for key in needed if not scaling.get(key)]
    if missing:
        raise ModelError(f"config.json: rope type {kind} needs {', '.join(missing)}")
    if kind == "longrope":
        for key in needed:
            if len(scaling[key]) != rotary // 2:
                raise ModelError(
                    f"config.json: {key} has {len(scaling[key])} entries; it needs {rotary // 2}"
                )


def _max_position(family: str, c: Config, rope: RopeSpec) -> int:
    """Context with scaling. Configs count it in max_position_embeddings for llama3, longrope and Gemma; for the
    others that is the length before scaling (yarn configs are found in both forms)."""
    trained = _integer(c, "max_position_embeddings")
    kind = rope.scaling.get("rope_type")
    if kind in ("linear", "dynamic") and family != "gemma3":
        return math.floor(trained * rope.scaling["factor"])
    if kind == "yarn":
        original = rope.scaling["original_max_position_embeddings"]
        return max(trained, math.floor(original * rope.scaling["factor"]))
    return trained
