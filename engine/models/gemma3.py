"""Gemma 3 (text): norms of q and k, five local layers (sliding window, own rope) to each global one."""

from __future__ import annotations

from headrace.engine.models.gemma2 import Gemma2

# Where checkpoints with a vision tower keep the language model, in the order they are tried.
_LANGUAGE = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
_VISION = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


class Gemma3(Gemma2):
    """The language model; a vision tower in the checkpoint is left aside."""

    def rename(self, name: str) -> str | None:
        if name.startswith(_VISION):
            return None
        for stored, own in _LANGUAGE:
            if name.startswith(stored):
                return own + name.removeprefix(stored)
        return name
