"""Vocabulary of the KV cache: what a layer stores (KVSpec), how it is laid out (KVFormat). Leaf, torch-free.

Logical shape of one layer's cache: [P, 2, H, S, D] = (block, key/value, KV head, token in block, head size).
A layout is the order of those axes in memory; views handed to implementations always have the logical order
K, V: [P, H, S, D] each, with strides that say the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["P", "K", "H", "S", "D"]
Layout = tuple[Axis, Axis, Axis, Axis, Axis]

# Bytes of scale behind the numbers of a token's key, and of its value, in one head. int8: a float32 by which they are
# multiplied. Views of such a cache are [P, H, S, D + scale], so the plain order is rows of numbers and their scale.
SCALE_BYTES = {"int8": 4}

# The canonical layout: what blocks are converted to when they leave a device (tiers, other machines).
CANONICAL: Layout = ("P", "K", "H", "S", "D")


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one attention layer stores per token. Layers with equal specs form a group."""

    kv_heads: int  # on this rank
    head_dim: int
    v_head_dim: int
    dtype: str  # "bfloat16", "float16", "float32", "int8", "fp8_e4m3", ...
    window: int = 0  # visible keys including self; 0 = unlimited
    # Multi-head latent attention: values are the first v_head_dim numbers of the keys and have no memory of their
    # own. V is a view of K then, and the layout is that of K alone. No dtype with scales.
    latent: bool = False

    def bytes_per_token(self, itemsize: int) -> int:
        if self.latent:
            return self.kv_heads * self.head_dim * itemsize
        numbers = (self.head_dim + self.v_head_dim) * itemsize
        return self.kv_heads * (numbers + 2 * SCALE_BYTES.get(self.dtype, 0))


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A layout an implementation accepts with the block sizes it can read."""

    layout: Layout
    block_sizes: tuple[int, ...] = ()  # exact sizes; empty = any multiple of `multiple_of`
    multiple_of: int = 1
    preference: int = 0  # higher is better
    preferred_block_size: int = 32
    # "" = plain elements in the layout's order; else the implementation's own order within each (block, head) run of
    # S x D elements, by a name that others must share to read it
    packing: str = ""

    def accepts(self, block_size: int) -> bool:
        if self.block_sizes:
            return block_size in self.block_sizes
        return block_size % self.multiple_of == 0


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share block tables: equal window (and so equal lifetime of blocks)."""

    window: int  # 0 = full attention
    layers: tuple[int, ...]
    bytes_per_block: int  # over all layers of the group, on this rank
    num_blocks: (
        int  # block 0 is the dummy block that padding rows write to; never given to a request
    )


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The engine's joint decision for all layers: one layout and block size, groups with their pools."""

    layout: Layout
    block_size: int  # tokens
    dtype: str
    groups: tuple[KVGroup, ...]
    reasons: tuple[str, ...] = ()
    packing: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(group.bytes_per_block * group.num_blocks for group in self.groups)
