"""The caches of all layers: memory from the device's allocator, seen through the layout of the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from headrace.platforms.kv_layout import SCALE_BYTES, KVGroup, KVPlan, KVSpec

KV_TAG = "kv_cache"

Reserve = Callable[[int, str], torch.Tensor]  # DeviceAllocator.reserve

_LOGICAL = ("P", "K", "H", "S", "D")
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2": torch.float8_e5m2,
}


def kv_torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a KVSpec.dtype. ValueError names the known ones."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ValueError(f"unknown KV dtype {name!r}; known: {', '.join(_DTYPES)}") from None


def allocate_caches(
    plan: KVPlan, specs: Sequence[KVSpec], reserve: Reserve
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer as logical views [P, Hkv, S, D] (D with the scale, if the dtype has one); strides say the
    plan's layout.

    The memory is not touched here: a CPU then commits a page when its first block is written.
    """
    groups: dict[int, KVGroup] = {layer: group for group in plan.groups for layer in group.layers}
    missing = [layer for layer in range(len(specs)) if layer not in groups]
    if missing:
        raise ValueError(f"the KV plan has no group for layers {missing}")
    return [
        _layer_cache(plan, groups[layer].num_blocks, spec, reserve)
        for layer, spec in enumerate(specs)
    ]


def _layer_cache(
    plan: KVPlan, blocks: int, spec: KVSpec, reserve: Reserve
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = kv_torch_dtype(spec.dtype)
    scale = SCALE_BYTES.get(spec.dtype, 0) // dtype.itemsize
    width, v_width = spec.head_dim + scale, spec.v_head_dim + scale
    if spec.latent and scale:
        raise ValueError(f"a latent cache has no scales, which {spec.dtype} needs")
    if spec.head_dim == spec.v_head_dim:
        sizes = {"P": blocks, "K": 2, "H": spec.kv_heads, "S": plan.block_size, "D": width}
        both = _view(reserve, plan.layout, sizes, dtype)  # [P, 2, H, S, D]
        return both[:, 0], both[:, 1]
    # Keys and values of unlike width cannot share one array: the same order of axes, without K.
    layout = tuple(axis for axis in plan.layout if axis != "K")
    sizes = {"P": blocks, "H": spec.kv_heads, "S": plan.block_size}
    key = _view(reserve, layout, {**sizes, "D": width}, dtype)
    if spec.latent:
        return key, key[..., :v_width]
    value = _view(reserve, layout, {**sizes, "D": v_width}, dtype)
    return key, value


def _view(
    reserve: Reserve, layout: Sequence[str], sizes: dict[str, int], dtype: torch.dtype
) -> torch.Tensor:
    shape = [sizes[axis] for axis in layout]
    memory = reserve(math.prod(shape) * dtype.itemsize, KV_TAG)
    stored = memory.view(dtype).view(shape)
    return stored.permute([layout.index(axis) for axis in _LOGICAL if axis in sizes])
