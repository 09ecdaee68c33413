"""ModelSpec from a GGUF header. Torch-free, numpy-free.

GGUF leaves to the program what a family always does; those rules are here: which Gemma layers see a window, their
local rotary base, the attention scale of the largest Gemmas, the scale of Gemma's embeddings.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from headrace.engine.models.spec import ModelSpec, RopeSpec
from headrace.engine.weights.gguf import GGUFFile, GGUFMetadata
from headrace.engine.weights.source import ModelError
from headrace.engine.weights.spec_hf import FAMILIES

# GGUF's name -> ours. Mistral and Mixtral models are stored as "llama".
_ARCHITECTURES = {
    name.replace("_moe", "moe"): name for name in FAMILIES if name not in ("mistral", "mixtral")
}
_EXPERTS = {"llama": "mixtral", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
# general.file_type -> what people call it
_FILE_TYPES = {
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    21: "Q2_K_S",
}
_PLAIN = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Layers of the Gemmas that scale attention by hidden / heads instead of by the head size (both are the 27B ones).
_SCALE_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}
_GEMMA_PATTERN = {"gemma2": 2, "gemma3": 6}


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """The spec of an opened GGUF model. Raises ModelError, naming the key, for what this engine cannot compute."""
    m = file.metadata
    arch = m.get("general.architecture")
    path = file.parts[0].path
    if arch not in _ARCHITECTURES:
        raise ModelError(
            f"{path}: the architecture {arch} is not supported; supported are "
            f"{', '.join(_ARCHITECTURES)} (Mistral and Mixtral files are llama)"
        )
    h = _Header(path, arch, m)
    experts = _experts(file, h)
    layers, hidden, heads = (
        h.integer("block_count"),
        h.integer("embedding_length"),
        h.uniform("attention.head_count"),
    )
    head_dim = h.integer("attention.key_length", hidden // heads)
    if h.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"{path}: {arch}.attention.value_length differs from key_length, which is not supported"
        )
    gemma = arch in _GEMMA_PATTERN
    windows = _windows(h, layers)
    ropes, rope_of_layer = _ropes(file, h, windows, head_dim)
    context = h.integer("context_length")
    by_width = (arch, layers) in _SCALE_BY_WIDTH
    return ModelSpec(
        architecture=_EXPERTS[arch] if experts else _ARCHITECTURES[arch],
        layers=layers,
        hidden=hidden,
        intermediate=h.uniform("feed_forward_length", 0 if experts else None),
        heads=heads,
        kv_heads=h.uniform("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=_vocab(file),
        max_position=max(context, _scaled_context(ropes[0])),
        norm_eps=h.number("attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh" if gemma else "silu",
        tie_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        **experts,
        norm_offset=0.0,  # Gemma's norms are stored as 1 + w
        windows=windows if any(windows) else (),
        ropes=ropes,
        rope_of_layer=rope_of_layer,
        attention_scale=(hidden / heads) ** -0.5 if by_width else 0.0,
        attention_softcap=h.number("attn_logit_softcapping", 50.0) if arch == "gemma2" else 0.0,
        final_softcap=h.number("final_logit_softcapping", 30.0 if arch == "gemma2" else 0.0),
        embedding_scale=hidden**0.5 if gemma else 1.0,
        dtype=_dtype(file),
        scheme=_scheme(file),
        bos_token_id=m.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(
            dict.fromkeys(
                m[key]
                for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
                if key in m
            )
        ),
    )


class _Header:
    """Metadata under the architecture's prefix, with types checked."""

    def __init__(self, path: str, arch: str, metadata: GGUFMetadata):
        self.path, self.arch, self.metadata = path, arch, metadata

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.arch}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or value < 0:
            raise ModelError(self._complaint(key, value))
        return value

    def uniform(self, key: str, default: int | None = None) -> int:
        """A number that may be stored once for each layer; all must be the same."""
        value = self.get(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(
                    f"{self.path}: {self.arch}.{key} differs between layers, which is not supported"
                )
            return int(value[0])
        return self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)):
            raise ModelError(self._complaint(key, value))
        return float(value)

    def _complaint(self, key: str, value: Any) -> str:
        what = "is missing" if value is None else f"is {value!r}"
        return f"{self.path}: {self.arch}.{key} {what}; the file is damaged, convert or download it again"


def _experts(file: GGUFFile, h: _Header) -> dict[str, Any]:
    """The spec's fields about experts; {} when there are none. Whether weights are normed is the family's rule."""
    experts, chosen = h.integer("expert_count", 0), h.integer("expert_used_count", 0)
    if not experts:
        return {}
    if h.arch not in _EXPERTS or not 0 < chosen <= experts:
        raise ModelError(
            f"{h.path}: {h.arch} with {experts} experts, {chosen} of them used, is not supported; "
            f"architectures with experts are {', '.join(_EXPERTS)}"
        )
    for key, usual in (("expert_gating_func", 1), ("expert_weights_scale", 1.0)):
        if h.number(key, usual) not in (0, usual):
            raise ModelError(f"{h.path}: {h.arch}.{key} is {h.get(key)}, which is not supported")
    size = h.uniform("expert_feed_forward_length", 0) or h.uniform("feed_forward_length")
    normed = h.get("expert_weights_norm")
    routed = {name.split(".")[1] for name in file.tensors if name.endswith(".ffn_gate_inp.weight")}
    shared = file.tensors.get(f"blk.{min(routed, key=int, default='0')}.ffn_gate_shexp.weight")
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "moe_intermediate": size,
        "shared_intermediate": shared.shape[0] if shared is not None else 0,
        "norm_topk_prob": h.arch != "qwen2moe" if normed is None else bool(normed),
        "dense_layers": tuple(i for i in range(h.integer("block_count")) if str(i) not in routed),
    }


def _vocab(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.parts[0].path} has no token_embd.weight; it is no complete model")
    return embedding.shape[0]


def _windows(h: _Header, layers: int) -> tuple[int, ...]:
    """Keys a layer sees, itself included; 0 is all. Gemma's windowed layers come first in each group."""
    window = h.integer("attention.sliding_window", 0)
    if not window:
        return (0,) * layers
    pattern = h.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise ModelError(
                f"{h.path}: {h.arch}.attention.sliding_window_pattern has {len(pattern)} entries "
                f"for {layers} layers; the file is damaged"
            )
        return tuple(window if windowed else 0 for windowed in pattern)
    group = pattern or _GEMMA_PATTERN.get(h.arch, 0)
    if not group:
        return (window,) * layers
    return tuple(window if (i + 1) % group else 0 for i in range(layers))


def _ropes(
    file: GGUFFile, h: _Header, windows: tuple[int, ...], head_dim: int
) -> tuple[tuple[RopeSpec, ...], tuple[int, ...]]:
    theta = h.number("rope.freq_base", 1000000.0 if h.arch == "gemma3" else 10000.0)
    rotary = h.integer("rope.dimension_count", head_dim)
    rotary = 0 if rotary == head_dim else rotary
    rope = RopeSpec(theta, rotary, _scaling(file, h), _floats(file, "rope_freqs.weight"))
    if h.arch != "gemma3":
        return (rope,), ()
    local = RopeSpec(h.number("rope.freq_base_swa", 10000.0), rotary)
    return (rope, local), tuple(int(window > 0) for window in windows)


def _scaling(file: GGUFFile, h: _Header) -> dict[str, Any]:
    kind = h.get("rope.scaling.type") or "none"
    factor = h.number("rope.scaling.factor", h.number("rope.scale_linear", 1.0))
    original = h.integer("rope.scaling.original_context_length", h.integer("context_length"))
    attention = h.number("rope.scaling.attn_factor", 1.0)
    short, long = (
        _floats(file, "rope_factors_short.weight"),
        _floats(file, "rope_factors_long.weight"),
    )
    if short and long:
        ratio = h.integer("context_length") / original
        scaling = {
            "rope_type": "longrope",
            "short_factor": list(short),
            "long_factor": list(long),
            "factor": ratio,
            "original_max_position_embeddings": original,
        }
        # llama.cpp's files carry the factor of cosine and sine ready made
        return {**scaling, "attention_factor": attention} if attention != 1.0 else scaling
    if kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
        for key in ("beta_fast", "beta_slow"):
            if h.get(f"rope.scaling.yarn_{key}") is not None:
                scaling[key] = h.number(f"rope.scaling.yarn_{key}")
        if attention != 1.0 and factor > 1:
            scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
        return scaling
    if kind not in ("none", "linear"):
        raise ModelError(
            f"{h.path}: {h.arch}.rope.scaling.type is {kind} without its factors; "
            "supported are none, linear, yarn, and longrope with its factor tensors"
        )
    return {"rope_type": "linear", "factor": factor} if factor not in (0.0, 1.0) else {}


def _scaled_context(rope: RopeSpec) -> int:
    if rope.scaling.get("rope_type") != "yarn":
        return 0
    return math.floor(rope.scaling["original_max_position_embeddings"] * rope.scaling["factor"])


def _floats(file: GGUFFile, name: str) -> tuple[float, ...]:
    tensor = file.tensors.get(name)
    if tensor is None:
        return ()
    if tensor.type.name != "F32":
        raise ModelError(
            f"{file.parts[0].path}: {name} is {tensor.type.name}, not F32; convert the model again"
        )
    return struct.unpack(f"<{tensor.nbytes // 4}f", file.rows(tensor))


def _matrix_types(file: GGUFFile) -> dict[str, int]:
    """Bytes of each type among the matrices, without routers (which are F32 in every file)."""
    sizes: dict[str, int] = {}
    for name, tensor in file.tensors.items():
        if len(tensor.shape) > 1 and ".ffn_gate_inp" not in name:
            sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    return sizes


def _dtype(file: GGUFFile) -> str:
    """The widest type of the matrices; quantized ones count as float32, what they are dequantized to."""
    kinds = set(_matrix_types(file))
    if kinds - set(_PLAIN) or "F32" in kinds or kinds == {"F16", "BF16"}:
        return "float32"
    return _PLAIN[kinds.pop()] if kinds else "float32"


def _scheme(file: GGUFFile) -> str:
    sizes = {k: v for k, v in _matrix_types(file).items() if k not in _PLAIN}
    if not sizes:
        return ""
    named = _FILE_TYPES.get(file.metadata.get("general.file_type", -1))
    return named or max(sizes, key=lambda kind: sizes[kind])
