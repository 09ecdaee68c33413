"""The joint KV decision of all layers: layout, block size, pools, and the context length that fits. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.engine.config.settings import CacheSettings
from headrace.engine.config.sizes import format_bytes
from headrace.engine.kv_cache.cache import blocks_for
from headrace.platforms.kv_layout import KVFormat, KVGroup, KVPlan, KVSpec, Layout

# A sliding group gets so many blocks that requests of this many tokens fill it and the full group at the same time.
# Longer requests leave some of it to the prefix cache, shorter ones are limited by it.
_TYPICAL_TOKENS = 2048

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


class KVPlanError(ValueError):
    """The KV cache cannot be made; one sentence with the numbers and the way out."""


@dataclass(frozen=True, slots=True)
class ContextChoice:
    max_model_len: int  # tokens
    note: str = ""  # why it is not simply the model's; "" when it is


@dataclass(frozen=True, slots=True)
class _Shape:
    """Layers of one window and what one block of theirs takes."""

    window: int
    layers: tuple[int, ...]
    bytes_per_block: int

    def alone(self, tokens: int, step_tokens: int, block_size: int) -> int:
        """Blocks, dummy included, with which one request of `tokens` always runs to its end."""
        blocks = blocks_for(tokens, block_size)
        if self.window:
            # the window before a chunk and the chunk itself, neither aligned to blocks
            chunk = min(step_tokens, tokens)
            blocks = min(blocks, blocks_for(self.window - 1 + chunk, block_size) + 1)
        return blocks + 1


@dataclass(frozen=True, slots=True)
class _Format:
    layout: Layout
    packing: str
    block_size: int
    reason: str


def item_bytes(dtype: str) -> int:
    """Bytes of one number of a KVSpec.dtype."""
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype]
    if dtype.startswith("fp8_"):
        return 1
    raise KVPlanError(f"unknown KV cache dtype {dtype!r}")


def choose_context(
    kv_specs: Sequence[KVSpec],
    kv_formats: Sequence[Sequence[KVFormat]],
    budget_bytes: int,
    settings: CacheSettings,
    requested: int,
    model_context: int,
    step_tokens: int,
    *,
    proposed_block_size: int = 0,
) -> ContextChoice:
    """The longest context that the model and the memory allow, or the requested one if they do.

    `requested` 0 leaves the choice open; `model_context` 0 is unknown; `proposed_block_size` as for make_kv_plan.
    Raises KVPlanError when the request exceeds the model or the memory, or when not even one block fits.
    """
    if requested and model_context and requested > model_context:
        raise KVPlanError(
            f"--max-model-len {requested} is more than the model's context of {model_context} tokens; lower it"
        )
    if not requested and not model_context:
        raise KVPlanError("the model does not say its context length; give --max-model-len")
    wanted = requested or model_context
    size = _resolve_format(kv_formats, settings.block_size, proposed_block_size).block_size
    shapes = _shapes(kv_specs, size)
    fits = _longest(
        wanted, lambda tokens: _fits(tokens, shapes, size, budget_bytes, settings, step_tokens)
    )
    have = _have(budget_bytes, settings, size)
    need = _describe(_bytes_alone(wanted, shapes, size, step_tokens), wanted, settings, size)
    if requested and fits < requested:
        longest = f"lower --max-model-len to {fits}, or " if fits else ""
        raise KVPlanError(
            f"a context of {requested} tokens needs {need} of KV cache and there is room for {have}; "
            f"{longest}enlarge the KV cache with --kv-cache-memory-bytes"
        )
    if fits < min(wanted, size):
        raise KVPlanError(
            f"the KV cache has room for {have}, less than one block of {size} tokens; free memory, raise "
            "--kv-cache-memory-bytes or take a smaller model"
        )
    if fits == wanted:
        return ContextChoice(wanted)
    return ContextChoice(
        fits,
        f"context of {fits} tokens: the model's {wanted} would need {need} of KV cache "
        f"and there is room for {have}",
    )


def make_kv_plan(
    kv_specs: Sequence[KVSpec],
    kv_formats: Sequence[Sequence[KVFormat]],
    budget_bytes: int,
    settings: CacheSettings,
    max_model_len: int,
    step_tokens: int,
    *,
    proposed_block_size: int = 0,
) -> KVPlan:
    """Layout and block size that every layer accepts, and pools that together fill `budget_bytes`.

    `kv_specs` and `kv_formats` have one entry a layer; `max_model_len` and `step_tokens` are what one request and one
    step may have. `settings.block_size` must be had, `proposed_block_size` is the platform's default: taken unless a
    layer cannot. Raises KVPlanError when no format suits all layers or one request of full length does not fit.
    """
    if not kv_specs:
        raise KVPlanError("the model has no attention layers to make a KV cache for")
    dtypes = sorted({spec.dtype for spec in kv_specs})
    if len(dtypes) > 1:
        raise KVPlanError(f"layers want KV caches of unlike dtypes: {', '.join(dtypes)}")
    chosen = _resolve_format(kv_formats, settings.block_size, proposed_block_size)
    size = chosen.block_size
    shapes = _shapes(kv_specs, size)
    if not _fits(max_model_len, shapes, size, budget_bytes, settings, step_tokens):
        need = _bytes_alone(max_model_len, shapes, size, step_tokens)
        raise KVPlanError(
            f"a context of {max_model_len} tokens needs {format_bytes(need)} of KV cache and there is room for "
            f"{_have(budget_bytes, settings, size)}; lower --max-model-len or raise --kv-cache-memory-bytes"
        )

    def pools(primary: int) -> list[int]:
        return _pools(primary, shapes, size, max_model_len, step_tokens)

    if settings.num_blocks:
        primary = settings.num_blocks
    else:
        # One more block in the first group never means fewer in another: the largest that fits is found by halving.
        primary = _longest(
            max(1, budget_bytes // shapes[0].bytes_per_block),
            lambda blocks: _total(pools(blocks), shapes) <= budget_bytes,
        )
    groups = tuple(
        KVGroup(shape.window, shape.layers, shape.bytes_per_block, blocks)
        for shape, blocks in zip(shapes, pools(primary), strict=True)
    )
    reasons = [chosen.reason]
    for group in groups:
        kind = f"a window of {group.window} tokens" if group.window else "full attention"
        reasons.append(
            f"{len(group.layers)} layers with {kind}: {group.num_blocks} blocks, "
            f"{format_bytes(group.num_blocks * group.bytes_per_block)}"
        )
    return KVPlan(chosen.layout, size, dtypes[0], groups, tuple(reasons), chosen.packing)


def _shapes(kv_specs: Sequence[KVSpec], block_size: int) -> list[_Shape]:
    """Layers by window: full attention first, then the larger windows."""
    layers: dict[int, list[int]] = {}
    for index, spec in enumerate(kv_specs):
        layers.setdefault(spec.window, []).append(index)
    order = sorted(layers, key=lambda window: -window if window else -math.inf)
    return [
        _Shape(
            window,
            tuple(layers[window]),
            block_size
            * sum(
                kv_specs[i].bytes_per_token(item_bytes(kv_specs[i].dtype)) for i in layers[window]
            ),
        )
        for window in order
    ]


def _pools(
    primary: int, shapes: list[_Shape], block_size: int, max_model_len: int, step_tokens: int
) -> list[int]:
    """Blocks of each group when the first one has `primary`."""
    typical = min(max_model_len, _TYPICAL_TOKENS)
    sizes = [max(primary, shapes[0].alone(max_model_len, step_tokens, block_size))]
    for shape in shapes[1:]:
        share = min(1.0, (shape.window + block_size) / typical)
        blocks = math.ceil(primary * share) + blocks_for(step_tokens, block_size)
        least = shape.alone(max_model_len, step_tokens, block_size)
        sizes.append(max(least, min(blocks, sizes[0])))
    return sizes


def _total(pools: list[int], shapes: list[_Shape]) -> int:
    return sum(n * shape.bytes_per_block for n, shape in zip(pools, shapes, strict=True))


def _bytes_alone(tokens: int, shapes: list[_Shape], block_size: int, step_tokens: int) -> int:
    return _total([shape.alone(tokens, step_tokens, block_size) for shape in shapes], shapes)


def _fits(
    tokens: int,
    shapes: list[_Shape],
    block_size: int,
    budget_bytes: int,
    settings: CacheSettings,
    step_tokens: int,
) -> bool:
    if settings.num_blocks:
        return shapes[0].alone(tokens, step_tokens, block_size) <= settings.num_blocks
    return _bytes_alone(tokens, shapes, block_size, step_tokens) <= budget_bytes


def _have(budget_bytes: int, settings: CacheSettings, block_size: int) -> str:
    if settings.num_blocks:
        return f"{settings.num_blocks} blocks of {block_size} tokens"
    return format_bytes(max(0, budget_bytes))


def _describe(need: int, tokens: int, settings: CacheSettings, block_size: int) -> str:
    if settings.num_blocks:
        return f"{blocks_for(tokens, block_size) + 1} blocks"
    return format_bytes(need)


def _longest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` for which a falling predicate holds; 0 when there is none."""
    if fits(limit):
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _resolve_format(
    kv_formats: Sequence[Sequence[KVFormat]], requested: int, proposed: int
) -> _Format:
    """The layout and block size that all layers accept and like best together."""
    best: tuple[tuple[int, bool, int, int], _Format] | None = None
    for layout, packing in dict.fromkeys((form.layout, form.packing) for form in kv_formats[0]):
        lists = [
            [form for form in forms if (form.layout, form.packing) == (layout, packing)]
            for forms in kv_formats
        ]
        for size in [requested] if requested else _candidate_sizes(lists, proposed):
            accepted = [[form for form in forms if form.accepts(size)] for forms in lists]
            if not all(accepted):
                continue
            liking = sum(max(form.preference for form in forms) for forms in accepted)
            preferring = sum(
                any(form.preferred_block_size == size for form in forms) for forms in accepted
            )
            score = (liking, size == proposed, preferring, -size)
            if best is None or score > best[0]:
                why = f"preferred by {preferring} of {len(lists)} layers"
                if requested or size == proposed:
                    why = "as asked for" if requested else "the platform's default"
                order = "".join(layout) + (f" ({packing})" if packing else "")
                reason = f"layout {order}, blocks of {size} tokens: {why}"
                best = (score, _Format(layout, packing, size, reason))
    if best is None:
        raise KVPlanError(_conflict(kv_formats, requested))
    return best[1]


def _candidate_sizes(lists: Sequence[Sequence[KVFormat]], proposed: int) -> list[int]:
    """Sizes worth trying: `proposed`, every exact or preferred one, and these raised to the multiple that all flexible
    formats need.

    A format with exact sizes makes the least common multiple wrong, so the caller still asks every layer.
    """
    forms = {form for formats in lists for form in formats}
    multiple = math.lcm(*(form.multiple_of for form in forms if not form.block_sizes))
    sizes = {proposed}
    for form in forms:
        sizes.update(form.block_sizes)
        sizes.add(form.preferred_block_size)
        sizes.add(blocks_for(form.preferred_block_size, multiple) * multiple)
        sizes.add(blocks_for(form.preferred_block_size, form.multiple_of) * form.multiple_of)
    return sorted(size for size in sizes if size > 0)


def _conflict(kv_formats: Sequence[Sequence[KVFormat]], requested: int) -> str:
    def accepts(forms: tuple[KVFormat, ...]) -> str:
        return " or ".join(
            f"{'/'.join(map(str, form.block_sizes)) or f'multiples of {form.multiple_of}'} "
            f"in {''.join(form.layout)}"
            for form in forms
        )

    layers: dict[tuple[KVFormat, ...], list[int]] = {}
    for index, forms in enumerate(kv_formats):
        layers.setdefault(tuple(forms), []).append(index)
    parts = [
        f"layers {', '.join(map(str, indices))} accept {accepts(forms) or 'nothing'}"
        for forms, indices in layers.items()
    ]
    what = f"a block size of {requested} tokens" if requested else "no block size and layout"
    verb = "does not suit" if requested else "suits"
    way_out = "leave --block-size out, or f" if requested else "f"
    return (
        f"{what} {verb} all layers ({'; '.join(parts)}); "
        f"{way_out}orce another attention implementation for some"
    )
