"""KVCache: prefix names, joint hits over groups, sliding windows, all-or-nothing allocation."""

from __future__ import annotations

from array import array

import pytest

from headrace.engine.kv_cache.cache import KVCache, SequenceBlocks, window_start
from headrace.engine.kv_cache.hashing import extend_keys, root_key
from headrace.engine.kv_cache.pool import DUMMY
from headrace.platforms.kv_layout import CANONICAL, KVGroup, KVPlan

S = 4  # tokens a block


def make_cache(*groups: tuple[int, int], caching: bool = True) -> KVCache:
    """groups: (window, blocks without the dummy)"""
    return KVCache(
        KVPlan(
            CANONICAL,
            S,
            "float32",
            tuple(KVGroup(w, (i,), 1, n + 1) for i, (w, n) in enumerate(groups)),
        ),
        caching,
    )


def tokens_of(*values: int) -> array[int]:
    return array("i", values)


def run_through(
    cache: KVCache, tokens: array[int], row: int = 0, salt: str = "", adapter: int = 0
) -> tuple[SequenceBlocks, int]:
    """Admit a sequence and compute all of it in one step; returns it with its cached tokens."""
    sequence = cache.sequence(salt, adapter)
    hit = cache.match(sequence, tokens, len(tokens) - 1)
    assert cache.admit(sequence, row, hit, (len(tokens), len(tokens)), 0)
    cache.register(sequence, tokens, len(tokens))
    return sequence, hit * S


def test_names_depend_on_everything_before():
    def keys(*values: int, root: bytes = b"") -> list[bytes]:
        found: list[bytes] = []
        extend_keys(found, root or root_key("", 0), tokens_of(*values), 2, len(values))
        return found

    assert len(keys(1, 2, 3, 4, 5)) == 2, "only full blocks have a name"
    assert keys(1, 2, 3, 4)[0] == keys(1, 2, 9, 9)[0]
    assert keys(1, 2, 3, 4)[1] != keys(7, 7, 3, 4)[1], "equal blocks behind unlike prefixes"
    roots = {root_key("", 0), root_key("a", 0), root_key("", 1), root_key("a", 1)}
    assert len(roots) == 4
    assert len({keys(1, 2, root=root)[0] for root in roots}) == 4


def test_names_do_not_depend_on_how_the_tokens_came():
    at_once: list[bytes] = []
    extend_keys(at_once, b"r", tokens_of(*range(9)), 2, 9)
    piecewise: list[bytes] = []
    for known in (1, 4, 5, 9):
        extend_keys(piecewise, b"r", tokens_of(*range(9)), 2, known)
    assert piecewise == at_once


def test_second_request_reuses_the_first_ones_blocks():
    cache = make_cache((0, 20))
    prompt = tokens_of(*range(10))
    first, hit = run_through(cache, prompt)
    assert hit == 0
    second, hit = run_through(cache, prompt, row=1)
    assert hit == 8
    assert second.tables[0][:2] == first.tables[0][:2]
    assert second.tables[0][2] != first.tables[0][2]
    assert cache.problems([first, second]) == []
    cache.free(first)
    assert cache.problems([second]) == []


def test_a_whole_prompt_in_the_cache_still_leaves_one_token_to_compute():
    cache = make_cache((0, 20))
    prompt = tokens_of(*range(8))
    run_through(cache, prompt)
    _, hit = run_through(cache, prompt, row=1)
    assert hit == 4


@pytest.mark.parametrize(("salt", "adapter", "expected"), [("", 0, 8), ("x", 0, 0), ("", 3, 0)])
def test_salt_and_adapter_keep_requests_apart(salt: str, adapter: int, expected: int):
    cache = make_cache((0, 20))
    prompt = tokens_of(*range(9))
    run_through(cache, prompt)
    assert run_through(cache, prompt, row=1, salt=salt, adapter=adapter)[1] == expected


def test_without_caching_nothing_is_found_or_kept():
    cache = make_cache((0, 20), caching=False)
    prompt = tokens_of(*range(9))
    sequence, _ = run_through(cache, prompt)
    assert run_through(cache, prompt, row=1)[1] == 0
    cache.free(sequence)
    assert sequence.keys == []


def test_eviction_takes_the_tail_of_a_prefix_first():
    cache = make_cache((0, 4))
    prompt = tokens_of(*range(12))
    sequence, _ = run_through(cache, prompt)
    cache.free(sequence)
    other, _ = run_through(cache, tokens_of(90, 91, 92, 93, 94), row=1)  # two blocks: one evicted
    probe = cache.sequence("", 0)
    assert cache.match(probe, tokens_of(*range(13)), 12) == 2
    assert cache.problems([other]) == []


def test_sliding_group_releases_what_left_the_window():
    cache = make_cache((0, 20), (5, 20))
    tokens = tokens_of(*range(40))
    sequence = cache.sequence("", 0)
    assert cache.admit(sequence, 0, 0, (40, 8), 0)
    for start in range(8, 40, 8):
        assert cache.extend(sequence, 0, start, start + 8)
        held = [i for i, block in enumerate(sequence.tables[1]) if block != DUMMY]
        assert held[0] == (start - 4) // S, "the block of the oldest visible token stays"
    assert all(block != DUMMY for block in sequence.tables[0])
    assert cache.problems([sequence]) == []
    updates = cache.take_updates()
    released = [tuple(u) for u in updates.tolist() if u[0] == 1 and u[3] == DUMMY]
    assert (1, 0, 0, DUMMY) in released, "workers are told, so no stale entry is ever read"
    assert len(tokens) == 40


def test_sliding_hit_needs_only_the_window_before_its_end():
    cache = make_cache((0, 40), (5, 40))
    prompt = tokens_of(*range(33))
    first, _ = run_through(cache, prompt)
    for key in first.keys[:6]:  # all but the blocks of tokens 24 to 31
        block = cache.pools[1].lookup(key)
        assert block is not None
        cache.pools[1].forget(block)
    second = cache.sequence("", 0)
    assert cache.match(second, prompt, 32) == 8
    cache.pools[1].forget(first.tables[1][7])
    assert cache.match(second, prompt, 32) == 7, "tokens 24 to 27 are still there"
    cache.pools[1].forget(first.tables[1][6])
    assert cache.match(second, prompt, 32) == 0, "a hit may end nowhere else"


def test_hit_is_joint_over_all_groups():
    cache = make_cache((0, 40), (5, 40), (9, 40))
    prompt = tokens_of(*range(33))
    first, _ = run_through(cache, prompt)
    probe = cache.sequence("", 0)
    assert cache.match(probe, prompt, 32) == 8
    # The window of 9 loses block 6: hits that end at 7 or 8 blocks need it, one at 6 does not.
    cache.pools[2].forget(first.tables[2][6])
    assert cache.match(probe, prompt, 32) == 6
    # The window of 5 loses block 5: for a hit at 6 it needs tokens 20 to 23.
    cache.pools[1].forget(first.tables[1][5])
    assert cache.match(probe, prompt, 32) == 5
    # Full attention needs everything from the start.
    cache.pools[0].forget(first.tables[0][2])
    assert cache.match(probe, prompt, 32) == 2


def test_admission_after_a_sliding_hit_holds_only_the_window():
    cache = make_cache((0, 40), (5, 40))
    prompt = tokens_of(*range(33))
    first, _ = run_through(cache, prompt)
    second, hit = run_through(cache, prompt, row=1)
    assert hit == 32
    assert second.tables[1][:7] == [DUMMY] * 7
    assert second.tables[1][7] == first.tables[1][7]
    assert cache.problems([first, second]) == []


def test_admission_is_all_or_nothing():
    cache = make_cache((0, 10), (100, 3))
    sequence = cache.sequence("", 0)
    assert not cache.admit(sequence, 0, 0, (20, 20), 0), "the second group is short"
    assert cache.problems([]) == [] and cache.used_blocks == 0
    assert len(cache.take_updates()) == 0
    assert cache.admit(sequence, 0, 0, (20, 12), 0)


def test_reserve_is_left_over_in_every_group():
    cache = make_cache((0, 5))
    assert not cache.admit(cache.sequence("", 0), 0, 0, (16, 16), 2)
    assert cache.admit(cache.sequence("", 0), 0, 0, (16, 16), 1)


def test_idle_cached_blocks_are_not_counted_twice():
    """A hit's blocks are available until it takes them: they cannot also serve as its new blocks."""
    cache = make_cache((0, 3))
    sequence, _ = run_through(cache, tokens_of(*range(9)))
    cache.free(sequence)
    longer = tokens_of(*range(16))
    probe = cache.sequence("", 0)
    hit = cache.match(probe, longer, 15)
    assert hit == 2
    assert cache.shortage(probe, hit, (16, 16), 0) == [1]
    assert not cache.admit(probe, 0, hit, (16, 16), 0)
    assert cache.problems([]) == []


def test_extend_takes_nothing_when_one_group_is_short():
    cache = make_cache((0, 10), (100, 2))
    sequence = cache.sequence("", 0)
    assert cache.admit(sequence, 0, 0, (8, 8), 0)
    assert not cache.extend(sequence, 0, 8, 12)
    assert len(sequence.tables[0]) == 2
    assert cache.problems([sequence]) == []


def test_forget_removes_all_names_of_a_sequence():
    cache = make_cache((0, 20), (5, 20))
    prompt = tokens_of(*range(20))
    sequence, _ = run_through(cache, prompt)
    cache.free(sequence)
    cache.forget(sequence)
    assert cache.match(cache.sequence("", 0), prompt, 19) == 0
    assert cache.problems([]) == []


@pytest.mark.parametrize(
    ("groups", "step", "room"),
    [
        (((0, 10),), 16, 40),
        (((0, 10), (5, 20)), 16, 40),
        (((0, 100), (5, 6)), 16, 400),  # 4 + 16 tokens, neither end aligned: 6 blocks
        (((0, 100), (5, 5)), 16, 20),  # too few to slide: the whole request must fit
    ],
)
def test_room_for_one_request(groups: tuple[tuple[int, int], ...], step: int, room: int):
    assert make_cache(*groups).room(step) == room


def test_window_counts_the_query_itself():
    assert [window_start(p, 3) for p in range(6)] == [0, 0, 0, 1, 2, 3]
    assert window_start(100, 0) == 0
