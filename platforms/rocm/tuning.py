"""How the shared kernels are launched on AMD's devices. Torch-free.

What decides is a device's features: matrix instructions, lanes of a wave, shared memory. A wave of 64 lanes does the
work of two warps, so there are half as many for the same rows. There are no asynchronous copies to keep many stages
filled, and each one costs shared memory: two for products, one for attention, whose loop has two loads. None of it was
measured: no such device was at hand. `compile_all` shows that registers and shared memory suffice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Threads of a workgroup at most.
MOST_THREADS = 1024
PRODUCTS = (
    *("experts_gate_up", "experts_down", "experts_gate_up_few", "experts_down_few"),
    "few_rows",
)
# What a matrix instruction computes at once is 16 x 16: the larger form of CDNA needs more registers for each row.
TILE = 16


def kernel_options(
    features: frozenset[str], kernel: str, query: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The launch options of a shared kernel that a device with these features wants changed."""
    lanes = 64 if "wave64" in features else 32
    changed: dict[str, Any] = {}
    if "num_warps" in options:
        waves = options["num_warps"] * 32 // lanes
        changed["num_warps"] = min(max(waves, 1), MOST_THREADS // lanes)
    if "PRECISION" in options:
        changed["PRECISION"] = "ieee"  # of float32; the shorter form that others have is refused
    if "LAST" in options:
        # Combining in the program that ends last needs its waves' stores to be seen by other programs before a count
        # is; a barrier of Triton's orders shared memory only on these devices.
        changed["LAST"] = False
    if kernel in ("prefill", "decode", "decode_many"):
        changed |= _attention(features, kernel.removesuffix("_many"), query, lanes)
    elif kernel in ("latent_prefill", "latent_decode"):
        changed |= {"num_warps": 256 // lanes, "num_stages": 1}
    elif kernel in PRODUCTS:
        changed["num_stages"] = min(options["num_stages"], 2)
    if "mfma" in features and "PRECISION" in options:
        changed["matrix_instr_nonkdim"] = TILE
    return changed


def _attention(features: frozenset[str], kernel: str, query: Any, lanes: int) -> dict[str, Any]:
    wide = max(query.head_dim, query.v_head_dim) > 128
    if query.dtype == "float32":
        if "mfma" in features:
            return {"num_warps": 4, "num_stages": 1}
        # Products on the ordinary units hold all operands in registers: the more threads, the fewer each has.
        keys = {"BLOCK_N": 16} if kernel == "prefill" else {}
        return {"num_warps": 16, "num_stages": 1, **keys}
    threads = {"prefill": 256, "decode": 256 if wide else 128}[kernel]
    return {
        "num_warps": threads // lanes,
        "num_stages": 1,
        "waves_per_eu": 1 if wide and kernel == "prefill" else 2,
    }
