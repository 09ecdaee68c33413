"""Rotary position embedding: one float32 table of cosines and sines for each kind of rope in a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.engine.layers.base import Layer, dtype_name
from headrace.engine.models.spec import RopeSpec
from headrace.engine.weights.source import ModelError
from headrace.platforms.attention import Turn
from headrace.platforms.queries import RotaryQuery

if TYPE_CHECKING:
    import torch

    from headrace.engine.models.base import BuildContext
    from headrace.engine.weights.source import TensorHandle


ORIGINAL = "original_max_position_embeddings"


class Rotary(Layer):
    """Rotates q and k in place by their positions. Layers with equal RopeSpecs share one object and its table.

    The table covers `max_model_len` positions. Two scalings depend on the length of the text (dynamic, longrope);
    a cached key cannot be rotated again when its request grows, so they are taken for `max_model_len` as a whole:
    with a `max_model_len` within the original context nothing is scaled, beyond it every request is.
    """

    def __init__(
        self, ctx: BuildContext, rope: RopeSpec, head_dim: int, max_model_len: int
    ) -> None:
        self._rope = rope
        self._dim = rope.rotary_dim or head_dim
        self._length = max_model_len
        self._device = ctx.device
        self._table: Any = None
        _scaling(rope)  # an unknown kind is refused before anything is loaded
        self._halves = not rope.interleaved
        self.query = RotaryQuery(head_dim, self._dim, dtype_name(ctx.dtype), self._halves)
        self._rotate = ctx.ops.bind("rotary_embedding", self.query)

    def __call__(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
        """positions [T]; q [T, Hq, D] and k [T, Hkv, D] are changed in place."""
        self._rotate(positions, q, k, self._table, self._halves)

    def turn(
        self, positions: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor] | None, eps: float
    ) -> Turn:
        """The same for PagedAttention.turn_and_write, behind the norms of q and k."""
        return Turn(positions, self._table, norms, eps)

    def load(self, tensors: Mapping[str, TensorHandle]) -> None:
        table = cos_sin_table(self._rope, self._dim, self._length)
        self._table = table.to(self._device)

    def held(self) -> Sequence[Any]:
        return (self._table,)


def cos_sin_table(rope: RopeSpec, dim: int, length: int) -> torch.Tensor:
    """float32 [length, dim]: cosines of the dim / 2 angles, then their sines, attention factor multiplied in."""
    import torch

    frequencies, factor = inverse_frequencies(rope, dim, length)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    table = torch.empty(length, dim, dtype=torch.float32)
    # One half at a time: the table of a long context is large, and so would be its temporaries.
    torch.cos(angles, out=table[:, : dim // 2])
    torch.sin(angles, out=table[:, dim // 2 :])
    return table if factor == 1.0 else table.mul_(factor)


def inverse_frequencies(rope: RopeSpec, dim: int, length: int) -> tuple[torch.Tensor, float]:
    """float32 [dim / 2] angles a position for texts of up to `length` tokens; the factor on cosines and sines.

    float32 arithmetic on purpose: it is what the checkpoints were trained and are compared with; at position 10^5 a
    float64 table differs from it in the third digit.
    """
    import torch

    kind, compute = _scaling(rope)
    frequencies, factor = compute(rope, dim, length)
    if rope.factors:
        if len(rope.factors) != dim // 2:
            raise ModelError(
                f"the file holds {len(rope.factors)} rope factors for {dim // 2} frequencies ({kind} rope); "
                "it was converted wrongly"
            )
        frequencies = frequencies / torch.tensor(rope.factors, dtype=torch.float32)
    return frequencies, factor


def _scaling(rope: RopeSpec) -> tuple[str, Callable[..., tuple[torch.Tensor, float]]]:
    kind = rope.scaling.get("rope_type", "default")
    kinds = {
        "default": _default,
        "linear": _linear,
        "dynamic": _dynamic,
        "llama3": _llama3,
        "yarn": _yarn,
        "longrope": _longrope,
    }
    if kind not in kinds:
        raise ModelError(f"rope type {kind!r} is not supported; known: {', '.join(sorted(kinds))}")
    return kind, kinds[kind]


def _inverse(theta: float, dim: int) -> torch.Tensor:
    import torch

    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _need(rope: RopeSpec, key: str) -> float:
    value = rope.scaling.get(key)
    if value is None:
        raise ModelError(
            f"the rope scaling of the model lacks {key!r}; add it to the model's config or to --hf-overrides"
        )
    return float(value)


def _default(rope: RopeSpec, dim: int, length: int) -> tuple[torch.Tensor, float]:
    return _inverse(rope.theta, dim), 1.0


def _linear(rope: RopeSpec, dim: int, length: int) -> tuple[torch.Tensor, float]:
    return _inverse(rope.theta, dim) / _need(rope, "factor"), 1.0


def _dynamic(rope: RopeSpec, dim: int, length: int) -> tuple[torch.Tensor, float]:
    """NTK-aware: a larger base for a longer text, none within the original context."""
    factor, original = _need(rope, "factor"), _need(rope, ORIGINAL)
    stretch = factor * max(length, original) / original - (factor - 1)
    return _inverse(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(rope: RopeSpec, dim: int, length: int) -> tuple[torch.Tensor, float]:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    import torch

    factor, original = _need(rope, "factor"), _need(rope, ORIGINAL)
    low, high = _need(rope, "low_freq_factor"), _need(rope, "high_freq_factor")
    frequencies = _inverse(rope.theta, dim)
    turns = original * frequencies / (2 * math.pi)  # full turns within the original context
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    scaled = (1 - blend) * frequencies / factor + blend * frequencies
    return torch.where(turns > high, frequencies, scaled), 1.0


def _yarn(rope: RopeSpec, dim: int, length: int) -> tuple[torch.Tensor, float]:
    """Dimensions that turn often are kept, those that turn seldom interpolated, with a ramp between."""
    import torch

    scaling = rope.scaling
    factor, original = _need(rope, "factor"), _need(rope, ORIGINAL)

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension(float(scaling.get("beta_fast") or 32))
    high = dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    frequencies = _inverse(rope.theta, dim)
    return frequencies / factor * ramp + frequencies * (1 - ramp), _yarn_factor(scaling, factor)


def _yarn_factor(scaling: Mapping[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(float(scaling["mscale"])) / mscale(float(scaling["mscale_all_dim"]))
    return mscale(1.0)


def _longrope(rope: RopeSpec, dim: int, length: int) -> tuple[torch.Tensor, float]:
    import torch

    scaling = rope.scaling
    factor, original = _need(rope, "factor"), _need(rope, ORIGINAL)
    key = "long_factor" if length > original else "short_factor"
    stretch = scaling.get(key) or ()
    if len(stretch) != dim // 2:
        raise ModelError(
            f"the longrope scaling of the model needs {dim // 2} numbers in {key!r}, it has {len(stretch)}"
        )
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    frequencies = _inverse(rope.theta, dim) / torch.tensor(stretch, dtype=torch.float32)
    return frequencies, float(attention)
