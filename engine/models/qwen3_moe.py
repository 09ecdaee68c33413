"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3's form with experts and no shared one."""

from __future__ import annotations

from headrace.engine.models.decoder import Decoder


class Qwen3Moe(Decoder):
    """Some layers may be dense (ModelSpec.dense_layers)."""
