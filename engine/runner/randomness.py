"""Randomness without state: a request's draw is a pure function of (seed, position).

No generator is advanced, so batch mates, chunking, preemption, restarts and the device cannot change what a seeded
request gets. Torch-free: computed on the host, a few numbers a step.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: a bijection of 64-bit words in which every input bit moves half of the output."""
    x = (x ^ (x >> _SHIFTS[0])) * _MULTIPLIERS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return x ^ (x >> _SHIFTS[2])


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) for (seed, position) pairs.

    seeds [R] uint64; positions [R], the index in the sequence of the token to be sampled -> float32 [R]. The seed is
    mixed before the position is added: neighbouring seeds must not give the same stream shifted by one.
    """
    with np.errstate(over="ignore"):
        counter = _mix(seeds.astype(np.uint64) + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN
        words = _mix(counter)
    # 24 bits: every value is exact in float32 and below 1.
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
