"""How the shared kernels are launched on AMD's devices. Torch-free.

What decides is a device's features: matrix instructions, lanes of a wave, shared memory. A wave has twice the lanes of
a warp where it has 64, so there are half as many for the same rows; there are no asynchronous copies to fill many
stages, and every stage costs shared memory. None of it was measured: no such device was at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Threads of a workgroup at most.
MOST_THREADS = 1024


def kernel_options(
    features: frozenset[str], kernel: str, query: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The launch options of a shared kernel that a device with these features wants changed."""
    wide_waves = "wave64" in features
    lanes = 64 if wide_waves else 32
    changed: dict[str, Any] = {}
    if "num_warps" in options:
        warps = options["num_warps"] // 2 if wide_waves else options["num_warps"]
        changed["num_warps"] = min(max(warps, 1), MOST_THREADS // lanes)
    if "PRECISION" in options:
        changed["PRECISION"] = "ieee"  # of float32; the shorter form that others have is refused
    if kernel in ("prefill", "decode"):
        changed |= _attention(features, kernel, query)
    return changed


def _attention(features: frozenset[str], kernel: str, query: Any) -> dict[str, Any]:
    wide = max(query.head_dim, query.v_head_dim) > 128
    waves = 1 if "wave64" in features else 2  # for each 64 threads
    chosen: dict[str, Any] = {"num_stages": 1}
    if query.dtype == "float32":
        rows = {"prefill": {"num_warps": 4 * waves}, "decode": {"num_warps": 4 * waves}}
        return chosen | rows[kernel]
    if kernel == "prefill":
        chosen |= {"num_warps": 4 * waves, "waves_per_eu": 1 if wide else 2}
    else:
        chosen |= {"num_warps": (2 if wide else 1) * waves, "waves_per_eu": 2}
    if "mfma" in features:
        chosen["matrix_instr_nonkdim"] = 16
    return chosen
