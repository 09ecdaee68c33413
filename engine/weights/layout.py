"""The tensors of a model by its spec: names and whole shapes, as the Hugging Face checkpoint has them. Torch-free."""

from __future__ import annotations

from headrace.engine.models.spec import ModelSpec

Shapes = dict[str, tuple[int, ...]]

_SANDWICH = ("gemma2", "gemma3")


def tensor_shapes(spec: ModelSpec) -> Shapes:
    """Every tensor of the model; linear weights are [out, in]."""
    shapes: Shapes = {"model.embed_tokens.weight": (spec.vocab, spec.hidden)}
    for layer in range(spec.layers):
        shapes.update(_layer(spec, layer, f"model.layers.{layer}."))
    shapes["model.norm.weight"] = (spec.hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    return shapes


def _layer(spec: ModelSpec, layer: int, prefix: str) -> Shapes:
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: Shapes = {}

    def linear(name: str, rows: int, cols: int, bias: bool) -> None:
        shapes[f"{prefix}{name}.weight"] = (rows, cols)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)

    linear("self_attn.q_proj", q, spec.hidden, spec.attention_bias)
    linear("self_attn.k_proj", kv, spec.hidden, spec.attention_bias)
    linear("self_attn.v_proj", kv, spec.hidden, spec.attention_bias)
    linear("self_attn.o_proj", spec.hidden, q, spec.output_bias)

    def mlp(name: str, intermediate: int, bias: bool) -> None:
        linear(f"{name}.gate_proj", intermediate, spec.hidden, bias)
        linear(f"{name}.up_proj", intermediate, spec.hidden, bias)
        linear(f"{name}.down_proj", spec.hidden, intermediate, bias)

    if spec.sparse(layer):
        linear("mlp.gate", spec.experts, spec.hidden, False)
        for expert in range(spec.experts):
            mlp(f"mlp.experts.{expert}", spec.moe_intermediate, False)
        if spec.shared_intermediate:
            mlp("mlp.shared_expert", spec.shared_intermediate, spec.mlp_bias)
            linear("mlp.shared_expert_gate", 1, spec.hidden, False)
    else:
        mlp("mlp", spec.intermediate, spec.mlp_bias)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if spec.architecture in _SANDWICH:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes.update({f"{prefix}{name}.weight": (spec.hidden,) for name in norms})
    if spec.qk_norm:
        shapes[f"{prefix}self_attn.q_norm.weight"] = (spec.head_dim,)
        shapes[f"{prefix}self_attn.k_norm.weight"] = (spec.head_dim,)
    return shapes
