"""What all kernels of this folder share: how a launch is described, and dependent launches.

A kernel that depends on the one before it begins with `after_previous`, once it has done what needs none of its
results (reading weights, say), and calls `let_next_start` when the next may begin to do the same. Both are nothing
unless the launch asks for it (`launch_pdl`), which only devices that say "pdl" among their features can.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def after_previous(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


def launch_options(
    kernel: str, query: Any, runtime: Any, options: Mapping[str, Any], dependent: bool = False
) -> dict[str, Any]:
    """Constants, warps and stages of a kernel: `options` as the runtime's device wants them.

    This is the one place where launch parameters are decided: a platform changes them by
    `DeviceRuntime.kernel_options`. `dependent`: the kernel knows dependent launches, by its constant PDL.
    """
    chosen = {**options, **runtime.kernel_options(kernel, query, options)}
    if dependent:
        chosen["PDL"] = pdl = "pdl" in runtime.info.features
        if pdl:
            chosen["launch_pdl"] = True
    return chosen


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and `least`: the sizes of Triton's blocks."""
    return max(least, 1 << (n - 1).bit_length())


def warps_for(width: int) -> int:
    """Warps for a program that handles one row of `width` elements, 8 a thread or so."""
    return min(max(width // 256, 1), 16)
