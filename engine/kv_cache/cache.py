"""KVCache: block tables of running sequences over the pools of all KV groups, and the prefix cache.

Blocks are named as soon as the step that fills them is scheduled, not when it has run: steps run in the order they
were submitted and every layer writes a whole step before it attends, so any later step, and any other sequence of
the same step, reads what was written. This is what lets the `n` choices of one prompt share its blocks although
they arrive together. A step that fails takes the names away (`forget_all`).

For the same reason a block may be freed and given away while a step that reads or writes it is still in flight:
whoever gets it writes in a later step.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from headrace.engine.kv_cache.hashing import extend_keys, root_key
from headrace.engine.kv_cache.pool import DUMMY, BlockPool
from headrace.platforms.kv_layout import KVPlan


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """One sequence's blocks. `tables[g][i]` holds tokens [i * S, (i + 1) * S) of group g, DUMMY where none is held."""

    root: bytes
    tables: list[list[int]]
    released: list[int]  # a group: leading table entries that hold no block any more
    keys: list[bytes] = field(default_factory=list)  # names of full blocks whose tokens are known
    registered: int = 0  # leading blocks that were offered to the prefix cache


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def window_start(position: int, window: int) -> int:
    """First token that a query at `position` sees; 0 without a window."""
    return max(0, position - window + 1) if window else 0


class KVCache:
    """Tables and pools of every group move together: a sequence is in all of them or in none."""

    def __init__(self, plan: KVPlan, caching: bool = True) -> None:
        self.block_size = plan.block_size
        self.caching = caching
        self.windows = [group.window for group in plan.groups]
        self.pools = [BlockPool(group.num_blocks) for group in plan.groups]
        self._updates: list[int] = []  # group, row, index, block, flattened

    def sequence(self, salt: str, adapter_id: int) -> SequenceBlocks:
        groups = len(self.pools)
        return SequenceBlocks(root_key(salt, adapter_id), [[] for _ in range(groups)], [0] * groups)

    @property
    def used_blocks(self) -> int:
        return sum(pool.used for pool in self.pools)

    @property
    def total_blocks(self) -> int:
        return sum(pool.num_blocks - 1 for pool in self.pools)

    def room(self, step_tokens: int) -> int:
        """Tokens that one sequence may have when it is alone, prefilled in chunks of `step_tokens`."""
        room = 1 << 31
        for window, pool in zip(self.windows, self.pools, strict=True):
            blocks = pool.num_blocks - 1
            chunk = min(step_tokens, room)
            if not window or blocks < blocks_for(window - 1 + chunk, self.block_size) + 1:
                room = min(room, blocks * self.block_size)
        return room

    def match(self, sequence: SequenceBlocks, tokens: array[int], limit: int) -> int:
        """Leading blocks of `tokens[:limit]` that every group can serve from its cache."""
        if not self.caching:
            return 0
        extend_keys(sequence.keys, sequence.root, tokens, self.block_size, len(tokens))
        hit = min(len(sequence.keys), limit // self.block_size)
        for window, pool in zip(self.windows, self.pools, strict=True):
            if not window:
                hit = next((i for i in range(hit) if pool.lookup(sequence.keys[i]) is None), hit)
        before = -1
        while hit != before:  # each sliding group may shorten what the others accepted
            before = hit
            for window, pool in zip(self.windows, self.pools, strict=True):
                if window:
                    hit = self._covered(pool, window, sequence.keys, hit)
        return hit

    def _covered(self, pool: BlockPool, window: int, keys: list[bytes], hit: int) -> int:
        """The longest hit up to `hit` whose last window - 1 tokens are all in the pool."""
        index = hit
        while index > window_start(hit * self.block_size, window) // self.block_size:
            index -= 1
            if pool.lookup(keys[index]) is None:
                hit = index
        return hit

    def shortage(
        self, sequence: SequenceBlocks, hit: int, ends: tuple[int, int], reserve: int
    ) -> list[int]:
        """Blocks of each group that `admit` with the same arguments lacks; 0 or less where it has enough."""
        missing = []
        for window, pool in zip(self.windows, self.pools, strict=True):
            first = self._first_needed(window, hit)
            cached = [self._named(pool, key) for key in sequence.keys[first:hit]]
            idle = sum(pool.references(block) == 0 for block in cached)
            new = blocks_for(ends[1 if window else 0], self.block_size) - hit
            missing.append(new + reserve - (pool.available - idle))
        return missing

    def admit(
        self, sequence: SequenceBlocks, row: int, hit: int, ends: tuple[int, int], reserve: int
    ) -> bool:
        """Start a sequence in `row` with `hit` cached blocks; False, and nothing changes, when blocks are short.

        `ends` are the tokens to have room for: in groups with full attention, which keep everything, and in sliding
        groups, which only need the first chunk. `reserve` blocks must stay available in each pool.
        """
        if any(missing > 0 for missing in self.shortage(sequence, hit, ends, reserve)):
            return False
        for group, (window, pool) in enumerate(zip(self.windows, self.pools, strict=True)):
            first = self._first_needed(window, hit)
            table = [DUMMY] * first
            for key in sequence.keys[first:hit]:
                table.append(self._named(pool, key))
                pool.acquire(table[-1])
            for index, block in enumerate(table):
                self._updates += (group, row, index, block)
            sequence.tables[group] = table
            sequence.released[group] = first
            self._grow(sequence, group, row, ends[1 if window else 0])
        sequence.registered = hit
        return True

    def _first_needed(self, window: int, hit: int) -> int:
        return window_start(hit * self.block_size, window) // self.block_size

    def _named(self, pool: BlockPool, key: bytes) -> int:
        block = pool.lookup(key)
        if block is None:
            raise RuntimeError("a prefix hit was used after its blocks were taken")
        return block

    def extend(self, sequence: SequenceBlocks, row: int, start: int, end: int) -> bool:
        """Room for tokens [start, end); blocks that no query from `start` on sees are released first.

        False, with nothing taken, when a pool is short of blocks.
        """
        for group, window in enumerate(self.windows):
            if window:
                self._slide(sequence, group, row, window_start(start, window) // self.block_size)
        count = blocks_for(end, self.block_size)
        for table, pool in zip(sequence.tables, self.pools, strict=True):
            if pool.available < count - len(table):
                return False
        for group in range(len(self.pools)):
            self._grow(sequence, group, row, end)
        return True

    def _slide(self, sequence: SequenceBlocks, group: int, row: int, first: int) -> None:
        """Release table entries before `first`. They then name the dummy block: a kernel that reads masked entries
        must not meet another request's content."""
        table, pool = sequence.tables[group], self.pools[group]
        first = min(first, len(table))
        for index in range(sequence.released[group], first):
            pool.release(table[index])
            table[index] = DUMMY
            self._updates += (group, row, index, DUMMY)
        sequence.released[group] = max(sequence.released[group], first)

    def _grow(self, sequence: SequenceBlocks, group: int, row: int, end: int) -> None:
        table, pool = sequence.tables[group], self.pools[group]
        for index in range(len(table), blocks_for(end, self.block_size)):
            block = pool.take()
            table.append(block)
            self._updates += (group, row, index, block)

    def capacity(self, sequence: SequenceBlocks) -> int:
        """Tokens the tables have room for in every group."""
        return min(len(table) for table in sequence.tables) * self.block_size

    def register(self, sequence: SequenceBlocks, tokens: array[int], end: int) -> None:
        """Name the full blocks of `tokens[:end]`, whose step is scheduled or done."""
        if not self.caching or end < (sequence.registered + 1) * self.block_size:
            return
        extend_keys(sequence.keys, sequence.root, tokens, self.block_size, end)
        last = end // self.block_size
        for group, pool in enumerate(self.pools):
            table = sequence.tables[group]
            for index in range(sequence.registered, last):
                if table[index] != DUMMY:
                    pool.register(table[index], sequence.keys[index])
        sequence.registered = last

    def free(self, sequence: SequenceBlocks) -> None:
        """Give every block back; the tail first, so that it is evicted before the shared head."""
        for group, pool in enumerate(self.pools):
            table = sequence.tables[group]
            for index in range(len(table) - 1, sequence.released[group] - 1, -1):
                pool.release(table[index])
            sequence.tables[group] = []
            sequence.released[group] = 0
        sequence.registered = 0

    def forget(self, sequence: SequenceBlocks) -> None:
        """Take the names of everything this sequence used away: its content is not to be trusted."""
        for key in sequence.keys:
            for pool in self.pools:
                block = pool.lookup(key)
                if block is not None:
                    pool.forget(block)

    def forget_all(self) -> None:
        for pool in self.pools:
            pool.forget_all()

    def gain(self, sequence: SequenceBlocks) -> list[int]:
        """Blocks of each group that become available when this sequence is freed."""
        return [
            sum(block != DUMMY and pool.references(block) == 1 for block in table)
            for table, pool in zip(sequence.tables, self.pools, strict=True)
        ]

    def take_updates(self) -> np.ndarray:
        """[N, 4] int32 table changes (group, row, index, block) since the last call, in order."""
        updates = np.array(self._updates, dtype=np.int32).reshape(-1, 4)
        self._updates = []
        return updates

    def problems(self, sequences: list[SequenceBlocks]) -> list[str]:
        """Leaks, when exactly `sequences` hold blocks."""
        found = []
        for group, pool in enumerate(self.pools):
            held = (block for s in sequences for block in s.tables[group] if block != DUMMY)
            found += [f"group {group}: {text}" for text in pool.problems(held)]
        return found
