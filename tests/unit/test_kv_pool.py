"""BlockPool: references, names, eviction order, and a random walk against a plain model."""

from __future__ import annotations

import random

import pytest

from headrace.engine.kv_cache.pool import DUMMY, BlockPool


def test_dummy_block_is_never_given_away():
    pool = BlockPool(4)
    assert DUMMY not in [pool.take() for _ in range(3)]
    assert pool.available == 0
    with pytest.raises(IndexError):
        pool.take()


def test_a_pool_of_the_dummy_alone_is_refused():
    with pytest.raises(ValueError, match="2 blocks"):
        BlockPool(1)


def test_named_blocks_stay_findable_until_they_are_needed():
    pool = BlockPool(4)
    blocks = [pool.take() for _ in range(3)]
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.register(block, key)
    for block in blocks:
        pool.release(block)
    assert pool.available == 3 and pool.used == 0
    pool.acquire(blocks[0])  # used again: it is now the youngest
    pool.release(blocks[0])
    assert pool.take() == blocks[1], "the least recently released goes first"
    assert pool.lookup(b"b") is None
    assert pool.lookup(b"a") == blocks[0] and pool.lookup(b"c") == blocks[2]


def test_free_blocks_are_taken_before_named_ones():
    pool = BlockPool(4)
    named, plain = pool.take(), pool.take()
    pool.register(named, b"a")
    pool.release(named)
    pool.release(plain)
    pool.take(), pool.take()
    assert pool.lookup(b"a") == named


def test_equal_content_keeps_the_first_name():
    pool = BlockPool(4)
    first, second = pool.take(), pool.take()
    pool.register(first, b"a")
    pool.register(second, b"a")
    assert pool.lookup(b"a") == first
    pool.release(second)
    assert pool.problems([first]) == []


def test_release_beyond_the_last_reference_is_an_error():
    pool = BlockPool(3)
    block = pool.take()
    pool.release(block)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(block)


def test_forget_makes_idle_blocks_free_and_keeps_used_ones():
    pool = BlockPool(4)
    idle, used = pool.take(), pool.take()
    pool.register(idle, b"a")
    pool.register(used, b"b")
    pool.release(idle)
    pool.forget_all()
    assert pool.lookup(b"a") is None and pool.lookup(b"b") is None
    assert pool.references(used) == 1 and pool.problems([used]) == []


@pytest.mark.parametrize("seed", range(10))
def test_random_walk_keeps_every_invariant(seed: int):
    rng = random.Random(seed)
    pool = BlockPool(12)
    held: list[int] = []
    for step in range(400):
        action = rng.random()
        if action < 0.4 and pool.available:
            held.append(pool.take())
        elif action < 0.6 and held:
            pool.register(rng.choice(held), bytes([rng.randrange(30)]))
        elif action < 0.7:
            block = pool.lookup(bytes([rng.randrange(30)]))
            if block is not None:
                pool.acquire(block)
                held.append(block)
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        assert pool.problems(held) == [], step
        assert pool.used == len(set(held))
