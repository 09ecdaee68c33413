"""Llama 2 and 3.x, and the many models of the same form (SmolLM2 among them)."""

from __future__ import annotations

from headrace.engine.models.decoder import Decoder


class Llama(Decoder):
    """Pre-norm blocks, grouped-query attention, SwiGLU; rope scaled as the spec says."""
