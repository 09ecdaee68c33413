"""Gemma 2: four norms a block, soft caps on scores and logits, every other layer with a sliding window."""

from __future__ import annotations

from headrace.engine.layers.decoder import SandwichBlock
from headrace.engine.models.decoder import Decoder


class Gemma2(Decoder):
    """Embeddings are scaled by sqrt(hidden); norms multiply by 1 + w (ModelSpec.norm_offset)."""

    block = SandwichBlock
