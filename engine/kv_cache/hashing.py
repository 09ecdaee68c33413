"""Names of cached blocks: a hash chain over token bytes, so that a name stands for the whole prefix."""

from __future__ import annotations

from array import array
from hashlib import blake2b

# 32 bytes: two prefixes with the same name would leak one client's context into another's answer, so the names
# must resist a search for collisions, which 16 bytes would not for long.
_KEY_BYTES = 32


def root_key(salt: str, adapter_id: int) -> bytes:
    """The parent of a first block. Sequences with unlike salts or adapters never share a block."""
    return blake2b(
        adapter_id.to_bytes(8, "little") + salt.encode(), digest_size=_KEY_BYTES
    ).digest()


def extend_keys(
    keys: list[bytes], root: bytes, tokens: array[int], block_size: int, known: int
) -> None:
    """Append the keys of every full block of `tokens[:known]` that has none yet."""
    parent = keys[-1] if keys else root
    view = memoryview(tokens)
    for index in range(len(keys), known // block_size):
        start = index * block_size
        hasher = blake2b(parent, digest_size=_KEY_BYTES)
        hasher.update(view[start : start + block_size])
        parent = hasher.digest()
        keys.append(parent)
