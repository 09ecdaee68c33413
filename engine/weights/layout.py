"""The tensors of a model by its spec: names and whole shapes, as the Hugging Face checkpoint has them. Torch-free."""

from __future__ import annotations

from headrace.engine.models.spec import LatentSpec, ModelSpec

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
    shapes: Shapes = {}

    def linear(name: str, rows: int, cols: int, bias: bool) -> None:
        shapes[f"{prefix}{name}.weight"] = (rows, cols)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)

    if spec.latent:
        shapes.update(_latent(spec, spec.latent, f"{prefix}self_attn."))
    else:
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
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
        if spec.routing.bias:
            shapes[f"{prefix}mlp.gate.e_score_correction_bias"] = (spec.experts,)
        for expert in range(spec.experts):
            mlp(f"mlp.experts.{expert}", spec.moe_intermediate, False)
        if spec.shared_intermediate:
            mlp("mlp.shared_expert", spec.shared_intermediate, spec.mlp_bias)
            if spec.shared_gate:
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


def _latent(spec: ModelSpec, sizes: LatentSpec, prefix: str) -> Shapes:
    q = spec.heads * (sizes.nope_dim + sizes.rope_dim)
    shapes = {
        "kv_a_proj_with_mqa": (sizes.kv_rank + sizes.rope_dim, spec.hidden),
        "kv_a_layernorm": (sizes.kv_rank,),
        "kv_b_proj": (spec.heads * (sizes.nope_dim + sizes.v_dim), sizes.kv_rank),
        "o_proj": (spec.hidden, spec.heads * sizes.v_dim),
    }
    if sizes.q_rank:
        shapes["q_a_proj"] = (sizes.q_rank, spec.hidden)
        shapes["q_a_layernorm"] = (sizes.q_rank,)
        shapes["q_b_proj"] = (q, sizes.q_rank)
    else:
        shapes["q_proj"] = (q, spec.hidden)
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}
