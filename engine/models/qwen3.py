"""Qwen3 (dense): no biases, norms of q and k over the head before rotary (ModelSpec.qk_norm)."""

from __future__ import annotations

from headrace.engine.models.decoder import Decoder


class Qwen3(Decoder):
    """The head size is the config's own, not hidden / heads."""
