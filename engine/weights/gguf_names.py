"""Names and row order: from GGUF's (llama.cpp's) to Hugging Face's. Torch-free."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from headrace.engine.models.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{p}_shexp": f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")},
    **{f"ffn_{p}_exps": f"mlp.experts.{p}_proj" for p in ("gate", "up", "down", "gate_up")},
}
# Gemma has a norm before and behind each half of a layer.
_GEMMA_BLOCK = {
    **_BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Tensors that describe the rotary embedding: ModelSpec has their content.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# The first files with experts have a tensor for each.
_EXPERT = re.compile(r"^blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight$")
_IN_BLOCK = re.compile(r"^blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)$")


def hf_name(architecture: str, name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that has none comes back as it is."""
    match = _IN_BLOCK.match(name)
    if match:
        layer, part, suffix = match.groups()
        table = _GEMMA_BLOCK if architecture in ("gemma2", "gemma3") else _BLOCK
        return f"model.layers.{layer}.{table[part]}.{suffix}" if part in table else name
    expert = _EXPERT.match(name)
    if expert:
        layer, part, number = expert.groups()
        return f"model.layers.{layer}.mlp.experts.{number}.{part}_proj.weight"
    part, _, suffix = name.rpartition(".")
    return f"{_TOP[part]}.{suffix}" if part in _TOP else name


def row_order(spec: ModelSpec, name: str) -> NDArray[np.intp] | None:
    """For each row of the Hugging Face tensor `name`, the row of the GGUF tensor; None when they are the same.

    llama.cpp stores q and k of the llama architecture with the two halves of a head interleaved, because its rotary
    embedding turns neighbouring pairs; Hugging Face's turns element i with element i + head_dim / 2.
    """
    if spec.architecture not in ("llama", "mixtral"):
        return None
    part = name.rsplit(".", 2)[-2] if name.count(".") > 1 else ""
    heads = {"q_proj": spec.heads, "k_proj": spec.kv_heads}.get(part)
    if heads is None:
        return None
    import numpy as np  # here: the command line needs names, not orders

    rows = np.arange(heads * spec.head_dim).reshape(heads, spec.head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)
