"""The functions of AITER that are called here, each by the places where releases of the package have it.

AITER compiles its kernels for the device at hand, some when it is imported and each of the others when it is first
called, and leaves the process (SystemExit) when that fails. Here a failed import is an ImportError and a failed call a
RuntimeError, so that the selection, or the self-test before it, goes on to the next implementation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
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
    "CustomAllreduce": ("aiter.dist.device_communicators.custom_all_reduce:CustomAllreduce",),
    "mla_decode": ("aiter.mla:mla_decode_fwd",),
    "mla_prefill": ("aiter.mla:mla_prefill_fwd",),
    "mla_splits": ("aiter.mla:get_meta_param",),
    "unified_attention": (
        "aiter.ops.triton.attention.unified_attention:unified_attention",
        "aiter.ops.triton.unified_attention:unified_attention",
    ),
}


@cache
def find(name: str) -> Any:
    """The function or class of that name. ImportError with all places when it is in none."""
    reason = _broken()
    if reason:
        raise ImportError(f"AITER cannot be imported ({reason})")
    failures = []
    for place in PLACES[name]:
        module, _, path = place.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (Exception, SystemExit) as error:
            failures.append(f"{place}: {type(error).__name__}: {error}")
        else:
            return found if isinstance(found, type) else _guarded(name, found)
    raise ImportError(f"AITER's {name} cannot be loaded ({'; '.join(failures)})")


@cache
def _broken() -> str:
    """Why the package cannot be imported, "" when it can: trying takes its time, so once is enough."""
    try:
        importlib.import_module("aiter")
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def forget() -> None:
    """What was found; for tests."""
    find.cache_clear()
    _broken.cache_clear()


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except SystemExit as error:
            raise RuntimeError(f"AITER could not build {name}: {error}") from error

    return call
