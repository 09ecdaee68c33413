"""How the shared kernels are launched on Intel's GPUs. Torch-free.

A "warp" of Triton is a sub-group there: of 16 lanes in kernels whose products run on matrix units, of 32 in all
others. The registers of a sub-group lie in one hardware thread: 8 KiB, or 16 with the large file, which Triton gives
to a kernel that spills. A sub-group of a product has eight rows, as many as one matrix instruction takes, and holds
the whole other operand: so many keys, and so deep a part of an expert, that they take a quarter of the larger file.
More keys spilled 15 times as many registers in machine code for Data Center GPU Max (tests/platforms/xpu/spirv.py),
and experts that now spill none spilled 50 to 190; heads of 256 spill with the fewest keys that there can be. A stage
is a prefetch into the cache, not a copy in local memory: two are enough. Nothing was timed: no such device was at
hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Lanes of a sub-group in kernels with products on matrix units, and in the others.
LANES_PRODUCTS, LANES = 16, 32
# Work items of a work group at most; with the large register file half as many fit.
MOST_THREADS, MOST_THREADS_PRODUCTS = 1024, 512
STAGES = 2
ROWS = 8  # of a product, for one sub-group
KEY_NUMBERS, FEWEST_KEYS = 2048, 16  # of the keys that a product takes at once
DEPTH = 32  # of an expert's weights that a product takes at once


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
            warps = max(warps, options["BLOCK_M"] // ROWS)
        changed["num_warps"] = max(min(warps, most // lanes), 1)
    if on_matrix_units and kernel in ("prefill", "decode"):
        keys = max(KEY_NUMBERS // options["D_PAD"], FEWEST_KEYS)
        changed["BLOCK_N"] = min(options["BLOCK_N"], keys)
    if on_matrix_units and "BLOCK_K" in options:
        changed["BLOCK_K"] = min(options["BLOCK_K"], DEPTH)
    if products:
        changed["num_stages"] = min(options["num_stages"], STAGES)
    return changed
