"""How much memory a step takes where it is not measured: an upper estimate from the shapes. Torch-free."""

from __future__ import annotations

from headrace.engine.models.spec import ModelSpec

_FLOAT = 4  # bytes: ops compute in float32 whatever they store


def estimate_activations(
    spec: ModelSpec, tokens: int, seqs: int, world: int, slice_elements: int
) -> int:
    """Bytes that a step of `tokens` tokens, of which `seqs` sample, holds at its peak on one of `world` ranks."""
    # residual, input and output of a block, norms, a copy for the sum over ranks
    streams = 6 * spec.hidden
    heads = 2 * (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    wide = max(3 * spec.intermediate, heads) // world
    logits = seqs * spec.vocab * _FLOAT
    # Filters sort a slice and sum it in float64: values, ids, masses, cumulative masses.
    filters = min(seqs * spec.vocab, slice_elements) * 8 * 4
    return tokens * (streams + wide + heads // world) * _FLOAT + 2 * logits + filters
