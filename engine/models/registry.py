"""The models there are, and what can be learnt of one without building it on a device. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from headrace.engine.models.base import BuildContext
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.deepseek_v2 import DeepseekV2
from headrace.engine.models.gemma2 import Gemma2
from headrace.engine.models.gemma3 import Gemma3
from headrace.engine.models.llama import Llama
from headrace.engine.models.mistral import Mistral
from headrace.engine.models.mixtral import Mixtral
from headrace.engine.models.qwen2 import Qwen2
from headrace.engine.models.qwen2_moe import Qwen2Moe
from headrace.engine.models.qwen3 import Qwen3
from headrace.engine.models.qwen3_moe import Qwen3Moe
from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.source import ModelError
from headrace.platforms.collectives import SoloCollectives
from headrace.platforms.platform import ModelShape

_MODELS: Mapping[str, type[Decoder]] = {
    "deepseek_v2": DeepseekV2,
    "deepseek_v3": DeepseekV2,
    "gemma2": Gemma2,
    "gemma3": Gemma3,
    "llama": Llama,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "qwen2": Qwen2,
    "qwen2_moe": Qwen2Moe,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
}


def supported() -> list[str]:
    """Values of ModelSpec.architecture that can be built."""
    return sorted(_MODELS)


def build_model(spec: ModelSpec, ctx: BuildContext, max_model_len: int) -> Decoder:
    """A model with bound ops and no weights yet. ModelError when it is unknown or cannot be divided over the ranks.

    `max_model_len` is the longest request in tokens: rotary tables cover it, and length-dependent rope scalings
    (dynamic, longrope) are taken for it.
    """
    if spec.architecture not in _MODELS:
        raise ModelError(
            f"architecture {spec.architecture!r} is not supported; supported: {', '.join(supported())}"
        )
    return _MODELS[spec.architecture](spec, ctx, max_model_len)


def selection_queries(
    spec: ModelSpec,
    dtype: str,
    kv_dtype: str = "",
    world: int = 1,
    schemes: Mapping[str, str] | None = None,
    can: Callable[[str, Any], bool] = lambda op, query: False,
) -> list[tuple[str, Any]]:
    """Every distinct (op, query) that building the model on one of `world` devices binds, in order of binding.

    `schemes` and `can` are BuildContext.schemes and Ops.can: which stored blocks the device computes with.
    """
    recorder = _Recorder(can)
    _build_unbound(spec, recorder, dtype, kv_dtype or dtype, world, schemes or {})
    return list(recorder.queries)


def model_shape(spec: ModelSpec) -> ModelShape:
    """The numbers that a platform's defaults may depend on."""
    model = _build_unbound(spec, _Recorder(), spec.dtype, spec.dtype, 1, {})
    weights = [
        weight for layer in model.layers() for weight in layer.weights() if not weight.optional
    ]
    return ModelShape(
        architecture=spec.architecture,
        layers=spec.layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocab=spec.vocab,
        parameters=sum(math.prod(weight.shape) for weight in weights),
        dtype=spec.dtype,
        max_position=spec.max_position,
        experts=spec.experts,
    )


class _Recorder:
    """Stands in for Ops: notes what is bound and binds nothing."""

    def __init__(self, can: Callable[[str, Any], bool] = lambda op, query: False) -> None:
        self.can = can
        self.queries: dict[tuple[str, Any], None] = {}

    def bind(self, op: str, query: Any) -> None:
        self.queries[op, query] = None


def _build_unbound(
    spec: ModelSpec,
    recorder: _Recorder,
    dtype: str,
    kv_dtype: str,
    world: int,
    schemes: Mapping[str, str],
) -> Decoder:
    group = SoloCollectives()
    group.world = world
    # Constructors use a dtype's name only and keep the device for loading, so plain stand-ins do.
    ctx = BuildContext(
        cast(Any, recorder), cast(Any, dtype), group, kv_dtype, cast(Any, None), schemes
    )
    return build_model(spec, ctx, spec.max_position)
