"""Quantization at load: which matrices of a float checkpoint become blocks, and of which type. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.engine.config.settings import ModelSettings
from headrace.engine.weights.source import ModelError

# --quantization -> the type of linear weights
TYPES = {"int8": "Q8_0", "q4": "Q4_0"}
# Both ends of the model decide most about its answers, and cost little: never less than 8 bits.
_ENDS = ("model.embed_tokens.weight", "lm_head.weight")
# Experts are chosen by a few rows of these, and heads are made from the last by products of their own: they stay as
# they are.
_KEPT = (".gate.weight", ".shared_expert_gate.weight", ".kv_b_proj.weight")
BLOCK = 32


def keeps_blocks(settings: ModelSettings, dtype: str, preferred: str) -> bool:
    """Whether a quantized file's blocks are to be computed with as they are.

    Left open, another dtype than the one the device prefers means that exact weights are wanted: they are then
    dequantized, as they are for devices without kernels for the blocks.
    """
    if settings.weights == "auto":
        return bool(settings.quantization) or dtype == preferred
    return settings.weights == "blocks"


def online_schemes(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, str], quantization: str
) -> dict[str, str]:
    """BuildContext.schemes with quantization at load: `stored` (blocks of the file), and a type for each float matrix.

    `shapes`: all tensors by the layers' names. Matrices whose rows cannot be cut into blocks have no entry. ModelError
    when there is nothing to quantize.
    """
    schemes = dict(stored)
    if not quantization:
        return schemes
    for name in (*shapes, _ENDS[1]):  # a tied checkpoint may hold a head of its own
        if name not in schemes and _divides(name, shapes.get(name, shapes[_ENDS[0]])):
            schemes[name] = "Q8_0" if name in _ENDS else TYPES[quantization]
    if not any(name in schemes and name not in stored for name in shapes):
        raise ModelError(
            f"--quantization {quantization} has nothing to do: the model's matrices are quantized already, or their "
            f"rows are no multiple of {BLOCK}; leave it out"
        )
    return schemes


def left_float(shapes: Mapping[str, tuple[int, ...]], schemes: Mapping[str, str]) -> list[str]:
    """Matrices that stay as they are."""
    return [name for name, shape in shapes.items() if len(shape) == 2 and name not in schemes]


def refuse_without_kernel(quantization: str, queries: Iterable[Any], device: str) -> None:
    """ModelError unless some linear layer computes on the blocks: a flag never does nothing in silence."""
    if quantization and not any(_on_blocks(query) for query in queries):
        raise ModelError(
            f"--quantization {quantization} has no kernel for this model on {device} (headrace explain shows why); "
            "leave it out"
        )


def refuse_lost_blocks(
    settings: ModelSettings, stored: Mapping[str, str], queries: Iterable[Any], device: str
) -> None:
    """ModelError when blocks are to be computed with (--weights blocks) but every layer dequantizes them."""
    kept = any(getattr(query, "scheme", "") for query in queries)
    if settings.weights == "blocks" and stored and not kept:
        kinds = ", ".join(sorted(set(stored.values())))
        raise ModelError(
            f"--weights blocks has no kernel for {kinds} on {device} (headrace explain shows why); leave it out: the "
            "weights are then dequantized at load"
        )


def _on_blocks(query: Any) -> bool:
    return hasattr(query, "in_features") and getattr(query, "scheme", "") in TYPES.values()


def _divides(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[1] % BLOCK == 0 and not name.endswith(_KEPT)
