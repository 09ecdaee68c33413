"""The functions of AITER that are called here, each by the places where releases of the package have it.

Importing AITER compiles parts of it for the device at hand and may fail in any way while it does: every failure is an
ImportError, which makes the selection go on to the next implementation.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any

# name here -> "module:attribute", the older places last
PLACES: Mapping[str, tuple[str, ...]] = {
    "rms_norm": ("aiter:rms_norm",),
    "add_rms_norm": ("aiter:rmsnorm2d_fwd_with_add",),
    "silu_and_mul": ("aiter:silu_and_mul",),
    "gelu_and_mul": ("aiter:gelu_and_mul",),
    "gelu_tanh_and_mul": ("aiter:gelu_tanh_and_mul",),
    "topk_softmax": ("aiter:topk_softmax",),
    "fused_moe": ("aiter.fused_moe:fused_moe",),
    "ActivationType": ("aiter:ActivationType",),
    "QuantType": ("aiter:QuantType",),
    "shuffle_weight": ("aiter.ops.shuffle:shuffle_weight",),
    "gemm": ("aiter.tuned_gemm:tgemm.mm",),
    "unified_attention": (
        "aiter.ops.triton.attention.unified_attention:unified_attention",
        "aiter.ops.triton.unified_attention:unified_attention",
    ),
}


@cache
def find(name: str) -> Any:
    """The function or class of that name. ImportError with all places when it is in none."""
    failures = []
    for place in PLACES[name]:
        module, _, path = place.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
            return found
        except Exception as error:  # the package runs compilers while it is imported
            failures.append(f"{place}: {type(error).__name__}: {error}")
    raise ImportError(f"AITER's {name} cannot be loaded ({'; '.join(failures)})")
