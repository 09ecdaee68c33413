"""BlockPool: the blocks of one KV group. Every operation is O(1) a block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

DUMMY = 0  # never given to a request: padding rows write here, released table entries point here


class BlockPool:
    """A block is free (no content), in use (references > 0) or idle (no reference, content still named).

    Idle blocks count as available: taking one forgets its content, the least recently released first.
    """

    __slots__ = ("_block_of", "_free", "_idle", "_key_of", "_references", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"a KV pool needs 2 blocks or more (one is the dummy), not {num_blocks}"
            )
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, DUMMY, -1))  # a stack: the lowest number on top
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest release first

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.num_blocks - 1 - self.available

    def references(self, block: int) -> int:
        return self._references[block]

    def lookup(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def take(self) -> int:
        """A block with one reference and no name. IndexError when none is available."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self.forget(block)
        else:
            raise IndexError("the KV pool is empty")
        self._references[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """One more reference to a named block."""
        if self._references[block] == 0:
            del self._idle[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One reference less. A block that nobody holds becomes idle when it has a name, else free."""
        references = self._references[block] - 1
        if references < 0:
            raise RuntimeError(f"KV block {block} was released more often than taken")
        self._references[block] = references
        if references == 0:
            if self._key_of[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None

    def register(self, block: int, key: bytes) -> None:
        """Name a block's content. An equal block that is named already keeps the name."""
        if self._key_of[block] is None and key not in self._block_of:
            self._key_of[block] = key
            self._block_of[key] = block

    def forget(self, block: int) -> None:
        """Take the name away; an idle block becomes free."""
        key = self._key_of[block]
        if key is None:
            return
        self._key_of[block] = None
        del self._block_of[key]
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def forget_all(self) -> None:
        for block in list(self._block_of.values()):
            self.forget(block)

    def problems(self, held: Iterable[int]) -> list[str]:
        """What is wrong when exactly the blocks in `held` (once a reference) are in use; for checks and tests."""
        count = [0] * self.num_blocks
        for block in held:
            count[block] += 1
        found = [
            f"block {block} has {have} references, {want} are held"
            for block, (have, want) in enumerate(zip(self._references, count, strict=True))
            if have != want
        ]
        free, idle = set(self._free), set(self._idle)
        in_use = {block for block, have in enumerate(self._references) if have}
        if len(free) != len(self._free) or free & idle or free & in_use or idle & in_use:
            found.append("a block is on two lists")
        if DUMMY in free | idle | in_use:
            found.append("the dummy block was given away")
        if len(free) + len(idle) + len(in_use) != self.num_blocks - 1:
            found.append("a block is on no list")
        if {k: b for b, k in enumerate(self._key_of) if k is not None} != self._block_of:
            found.append("names and blocks disagree")
        return found
