"""A model folder for the fake platform: a config and nothing else, read with load_format "dummy"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 320


def write_model(folder: Path, **changes: Any) -> Path:
    """A two-layer Llama whose vocabulary no other layer is as wide as; `changes` go into config.json."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
