"""Sentences about a model and its memory that explain and the start-up panel share."""

from __future__ import annotations

from collections import Counter

from headrace.cli.prepare import Plan, blocks
from headrace.engine.config.resolve import source_of
from headrace.engine.config.settings import EngineConfig
from headrace.engine.config.sizes import format_bytes, format_count
from headrace.engine.kv_cache.plan import item_bytes
from headrace.engine.models.registry import model_shape
from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.layout import tensor_shapes
from headrace.engine.weights.online import left_float
from headrace.platforms.kv_layout import SCALE_BYTES, KVSpec


def model_line(plan: Plan) -> str:
    """ "demo: llama, 135 M parameters, Q4_1"."""
    parameters = model_shape(plan.spec).parameters
    size = f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"
    stored = plan.spec.scheme or plan.spec.dtype
    return f"{plan.files.name}: {plan.spec.architecture}, {size} parameters, {stored}"


def quantization(plan: Plan) -> list[tuple[str, str]]:
    """A row (name, text) on what --quantization does; none without it."""
    if not plan.config.model.quantization:
        return []
    shapes, schemes = tensor_shapes(plan.spec), blocks(plan)
    counts = Counter(schemes[name] for name in shapes if name in schemes)
    text = (
        ", ".join(f"{scheme} for {count}" for scheme, count in counts.most_common()) + " matrices"
    )
    rest = left_float(shapes, schemes)
    if rest:
        text += f"; {len(rest)} stay in {plan.config.model.dtype} ({rest[0]}, ...)"
    return [("quantized", f"{text}{why(plan.config, 'model.quantization')}")]


def kv_specs(spec: ModelSpec, kv_dtype: str, world: int) -> list[KVSpec]:
    """What each layer stores on one of `world` ranks."""
    if spec.latent:
        sizes = (1, spec.head_dim, spec.latent.kv_rank)
        return [KVSpec(*sizes, kv_dtype, latent=True)] * spec.layers
    heads = max(1, spec.kv_heads // world)
    return [
        KVSpec(heads, spec.head_dim, spec.head_dim, kv_dtype, spec.window(layer))
        for layer in range(spec.layers)
    ]


def kv_bytes_per_token(specs: list[KVSpec]) -> int:
    return sum(spec.bytes_per_token(item_bytes(spec.dtype)) for spec in specs)


def kv_arithmetic(spec: ModelSpec, kv_dtype: str, world: int) -> str:
    """ "22.5 KiB a token = 30 layers x 2 x 3 heads x 64 x 2 bytes (bfloat16)", scales and windows named."""
    specs = kv_specs(spec, kv_dtype, world)
    windows = [row.window for row in specs if row.window]
    head, scale = f"{spec.head_dim} x {item_bytes(kv_dtype)}", SCALE_BYTES.get(kv_dtype, 0)
    if scale:
        head = f"({head} + {scale} of scale)"
    what = "one row for all heads" if spec.latent else f"2 x {specs[0].kv_heads} heads"
    text = (
        f"{format_bytes(kv_bytes_per_token(specs))} a token = {len(specs)} layers x {what} x "
        f"{head} bytes ({kv_dtype})"
    )
    if windows:
        text += f"; {len(windows)} layers keep the last {format_count(max(windows))} tokens only"
    return text


def why(config: EngineConfig, path: str) -> str:
    """ " (platform cpu: reason)" for a value that somebody set, "" for a built-in default."""
    row = source_of(config, path)
    if row is None:
        return ""
    return f" ({row.source}: {row.reason})" if row.reason else f" ({row.source})"
