"""Mixtral: Mistral's form with experts in place of every feed-forward network (ModelSpec.experts)."""

from __future__ import annotations

from headrace.engine.models.decoder import Decoder

# Names of the checkpoints on the hub, and those of every other model with experts.
_OWN = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.weight", ".gate_proj.weight"),
    (".w2.weight", ".down_proj.weight"),
    (".w3.weight", ".up_proj.weight"),
)


class Mixtral(Decoder):
    """The weights of a token's experts sum to 1."""

    def rename(self, name: str) -> str | None:
        for stored, own in _OWN:
            name = name.replace(stored, own)
        return name
