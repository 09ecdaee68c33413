"""How the shared kernels are launched on Intel's GPUs. Torch-free.

A "warp" of Triton is a sub-group there: of 16 lanes in kernels whose products run on matrix units, of 32 in all
others. The registers of a sub-group lie in one hardware thread: 8 KiB, or 16 with the large file, which Triton gives
to a kernel that spills (half of both on Arc A). A sub-group of a product has eight rows, as many as one matrix
instruction takes, and holds the whole other operand: so many keys, and so deep a part of an expert, that they take a
quarter of the larger file. More keys spilled 15 times as many registers in machine code for Data Center GPU Max
(tests/platforms/xpu/spirv.py), and experts that now spill none spilled 50 to 190; heads of 256 spill with the fewest
keys that there can be.

Triton reaches matrix units by sub-groups of 16 lanes alone: those of Arc A and of Core Ultra 200H take 8, so products
run on the ordinary units there, in the smallest tiles, and spill with heads of 128.

A stage is a prefetch into the cache, not a copy in local memory: two are enough. Nothing was timed: no such device
was at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Lanes of a sub-group in kernels with products on matrix units, and in the others.
LANES_PRODUCTS, LANES = 16, 32
# Work items of a work group at most; with the large register file half as many fit.
MOST_THREADS, MOST_THREADS_PRODUCTS = 1024, 512
STAGES = 2
ROWS = 8  # of a product on matrix units, for one sub-group
KEY_NUMBERS, FEWEST_KEYS = 2048, 16  # of the keys that such a product takes at once
DEPTH = 32  # of an expert's weights that it takes at once
PLAIN_TILE, PLAIN_WARPS = (
    16,
    16,
)  # of products on the ordinary units: rows, keys and depth; sub-groups


def kernel_options(
    features: frozenset[str], kernel: str, query: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The launch options of a shared kernel that a device with these features wants changed."""
    if "PRECISION" not in options:
        most = MOST_THREADS // LANES
        return {"num_warps": most} if options.get("num_warps", 0) > most else {}
    changed: dict[str, Any] = {"num_stages": min(options["num_stages"], STAGES)}
    if "xmx16" in features and query.dtype != "float32":
        warps = max(options["num_warps"] * LANES // LANES_PRODUCTS, options["BLOCK_M"] // ROWS)
        changed["num_warps"] = min(warps, MOST_THREADS_PRODUCTS // LANES_PRODUCTS)
        if "D_PAD" in options:
            keys = max(KEY_NUMBERS // options["D_PAD"], FEWEST_KEYS)
            changed["BLOCK_N"] = min(options["BLOCK_N"], keys)
        else:
            changed["BLOCK_K"] = min(options["BLOCK_K"], DEPTH)
        return changed
    changed["num_warps"] = PLAIN_WARPS
    if "D_PAD" in options:
        group = 1 << (options["GROUP"] - 1).bit_length()  # rows of a tile are whole groups of heads
        changed |= {"BLOCK_M": max(PLAIN_TILE, group), "BLOCK_N": PLAIN_TILE}
    else:
        changed["BLOCK_K"] = PLAIN_TILE
    return changed
