"""Selection queries, one frozen dataclass for each kind of op. Torch-free.

A new field gets a default that means "not needed", so old implementations stay valid.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearQuery:
    """y[T, out] = x[T, in] @ w[out, in]^T (+ bias[out]); `scheme` is the storage of w ("bfloat16", "Q4_0", ...)."""

    in_features: int
    out_features: int
    dtype: str  # of x and y
    scheme: str = ""  # "" = same as dtype
    bias: bool = False
    out_dtype: str = ""  # of y; "" = dtype


@dataclass(frozen=True, slots=True)
class EmbeddingQuery:
    vocab: int
    hidden: int
    dtype: str
    scheme: str = ""
    scale: float = 1.0  # rows are multiplied by it


@dataclass(frozen=True, slots=True)
class RouterQuery:
    """Which of `experts` each token goes to: the `top_k` best by the scores of its logits."""

    experts: int
    top_k: int
    renormalize: bool = False  # the chosen weights sum to 1 before they are scaled
    scoring: str = "softmax"  # "softmax" | "sigmoid"
    groups: int = 1  # equal runs of experts; a token's experts come from
    top_groups: int = 1  # so many of them
    bias: bool = False  # a number for each expert is added to its score where experts are chosen
    scale: float = 1.0  # of the weights

    @property
    def plain(self) -> bool:
        """Softmax over all experts, and nothing more."""
        return self == RouterQuery(self.experts, self.top_k, self.renormalize)


@dataclass(frozen=True, slots=True)
class ExpertsQuery:
    """Gated feed-forward experts: gate and up [2 * intermediate, hidden] in `scheme`, down [hidden, intermediate] in
    `down_scheme` ("" = same as dtype), both on this rank."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    dtype: str  # of x and y
    scheme: str = ""
    down_scheme: str = ""
    activation: str = "silu"  # "silu" | "gelu_tanh" | "gelu"


@dataclass(frozen=True, slots=True)
class NormQuery:
    hidden: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ActivationQuery:
    intermediate: int
    dtype: str


@dataclass(frozen=True, slots=True)
class RotaryQuery:
    head_dim: int
    rotary_dim: int
    dtype: str
    is_neox: bool = True


@dataclass(frozen=True, slots=True)
class AttentionQuery:
    """One attention layer's constants; layers with equal queries share an implementation instance and a plan."""

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    kv_dtype: str
    scale: float
    window: int = 0  # visible keys including self; 0 = unlimited
    softcap: float = 0.0  # 0 = none; scores become softcap * tanh(scores / softcap)
    sinks: bool = False
    graph: bool = False
    latent: bool = False  # values are the first v_head_dim numbers of the keys: KVSpec.latent


@dataclass(frozen=True, slots=True)
class SampleQuery:
    vocab: int
    max_reqs: int


@dataclass(frozen=True, slots=True)
class GroupQuery:
    """Collectives (platforms/collectives.py) of `world` ranks, each with a device of its own."""

    world: int
    same_node: bool = True
