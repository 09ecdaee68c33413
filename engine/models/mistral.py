"""Mistral: Llama's form with a sliding window on every layer (ModelSpec.windows)."""

from __future__ import annotations

from headrace.engine.models.decoder import Decoder


class Mistral(Decoder):
    """Versions without a window (0.2 and later) have windows of 0."""
