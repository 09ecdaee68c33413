"""How the shared kernels are launched on Intel's GPUs. Torch-free.

A "warp" of Triton is a sub-group there: of 16 lanes in kernels whose products run on matrix units, of 32 in all others.
The registers of a sub-group lie in one hardware thread, 8 KiB of them: products get so many sub-groups that sums take
half of it at most. A stage is a prefetch into the cache, not a copy in local memory: two are enough. Which register
file a kernel gets is left to Triton, which builds one that spills anew with the large one. None of it was measured: no
such device was at hand. The kernels are compiled to SPIR-V with it (tests/platforms/xpu/prove.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Lanes of a sub-group in kernels with products on matrix units, and in the others.
LANES_PRODUCTS, LANES = 16, 32
# Work items of a work group at most; with the large register file half as many fit.
MOST_THREADS, MOST_THREADS_PRODUCTS = 1024, 512
STAGES = 2
SUMS = 1024  # float32 sums that one sub-group holds


def kernel_options(
    features: frozenset[str], kernel: str, query: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The launch options of a shared kernel that a device with these features wants changed."""
    changed: dict[str, Any] = {}
    products = "PRECISION" in options
    on_matrix_units = products and "xmx" in features and query.dtype != "float32"
    if "num_warps" in options:
        threads = options["num_warps"] * LANES
        lanes = LANES_PRODUCTS if on_matrix_units else LANES
        most = MOST_THREADS_PRODUCTS if products else MOST_THREADS
        warps = threads // lanes
        if on_matrix_units:
            sums = options["BLOCK_M"] * options.get("DV_PAD", options["BLOCK_N"])
            warps = max(warps, sums // SUMS)
        changed["num_warps"] = max(min(warps, most // lanes), 1)
    if products:
        changed["num_stages"] = min(options["num_stages"], STAGES)
    return changed
