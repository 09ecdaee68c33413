"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's form with experts, one of them shared by all tokens behind a gate."""

from __future__ import annotations

from headrace.engine.models.decoder import Decoder


class Qwen2Moe(Decoder):
    """Some layers may be dense (ModelSpec.dense_layers); the shared expert is ModelSpec.shared_intermediate wide."""
