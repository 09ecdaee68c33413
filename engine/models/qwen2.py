"""Qwen2 and Qwen2.5: Llama's form with biases on q, k and v (ModelSpec.attention_bias)."""

from __future__ import annotations

from headrace.engine.models.decoder import Decoder


class Qwen2(Decoder):
    """Some checkpoints have a sliding window on their last layers (ModelSpec.windows)."""
