"""ModelSpec: what a checkpoint says of its architecture, in one form for every source. Torch-free.

Made from a Hugging Face config.json or from GGUF metadata (engine/weights reads both); used by the engine to plan,
by `explain`, and by the model families to build themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of some layers.

    `scaling` is {} for the plain form, else Hugging Face's own keys: rope_type ("linear", "dynamic", "llama3", "yarn",
    "longrope"), factor and the type's others. It is complete: for all types but linear,
    original_max_position_embeddings (for dynamic: the length its formula counts from) is always there.
    """

    theta: float = 10000.0
    rotary_dim: int = 0  # 0 = head_dim
    scaling: dict[str, Any] = field(default_factory=dict)
    # what each inverse frequency is divided by, stored as a tensor (GGUF rope_freqs.weight), length rotary_dim / 2
    factors: tuple[float, ...] = ()
    interleaved: bool = False  # pairs are (2i, 2i + 1), not (i, i + rotary_dim / 2)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention: keys and values of all heads are made from `kv_rank` numbers a token; a part of
    each key, equal for all heads, is turned and stored beside them."""

    kv_rank: int
    q_rank: int  # of what queries are made from; 0 = from the hidden state itself
    nope_dim: int  # of a head's query and key: what is not turned
    rope_dim: int  # and what is
    v_dim: int  # of a head's value


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """How experts are chosen, where not by softmax over all of them: see the op "topk_softmax"."""

    scoring: str = "softmax"  # "softmax" | "sigmoid"
    groups: int = 1
    top_groups: int = 1
    bias: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    architecture: (
        str  # a name of the model registry: "llama", "mixtral", "qwen3_moe", "gemma3", ...
    )
    layers: int
    hidden: int
    intermediate: int  # of layers without experts
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_position: int  # context the checkpoint was made for, scaling included
    norm_eps: float
    activation: str = "silu"  # "silu" | "gelu_tanh" | "gelu"
    tie_embeddings: bool = False
    attention_bias: bool = False  # on q, k, v
    output_bias: bool = False  # on o
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = (
        0.0  # 1.0: the norm multiplies by (1 + w) (Gemma in Hugging Face form; GGUF stores 1 + w)
    )
    experts: int = 0  # 0 = none; a token's feed-forward network is `experts_per_token` of them
    experts_per_token: int = 0
    moe_intermediate: int = 0  # of one expert
    shared_intermediate: int = 0  # of the expert that every token goes to; 0 = none
    shared_gate: bool = True  # what that expert gives is weighted by a gate of its own
    routing: RoutingSpec = RoutingSpec()
    norm_topk_prob: bool = False  # the chosen experts' weights sum to 1
    dense_layers: tuple[int, ...] = ()  # layers of a model with experts that have none
    latent: LatentSpec | None = None  # heads then share one KV head of kv_rank + rope_dim numbers
    windows: tuple[
        int, ...
    ] = ()  # one a layer: visible keys including self, 0 = full; () = all full
    ropes: tuple[RopeSpec, ...] = (RopeSpec(),)
    rope_of_layer: tuple[int, ...] = ()  # index into ropes, one a layer; () = all 0
    attention_scale: float = 0.0  # 0 = head_dim ** -0.5
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    dtype: str = "float32"  # dtype the checkpoint stores (the widest one for mixed files)
    scheme: str = ""  # quantization of the file, for people: "Q4_1", "Q4_K_M", "" = none
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def sparse(self, layer: int) -> bool:
        """Whether the layer's feed-forward network is made of experts."""
        return self.experts > 0 and layer not in self.dense_layers

    def rope(self, layer: int) -> RopeSpec:
        return self.ropes[self.rope_of_layer[layer] if self.rope_of_layer else 0]
