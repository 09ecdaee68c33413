"""Paged attention beyond the generated cases: chunks, batches, skipped slots, long contexts, KV formats."""

from __future__ import annotations

import pytest
import torch

from headrace.platforms.cpu import attention as cpu_attention
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.kv_layout import CANONICAL
from headrace.platforms.queries import AttentionQuery
from headrace.platforms.reference import cases
from headrace.platforms.reference.cases import Requests, make_batch, make_caches, scattered_blocks
from headrace.platforms.registry import Registry, SelectionError

NAMES = [
    row.name
    for row in Registry.with_reference(CpuPlatform().implementations()).candidates(
        "paged_attention"
    )
]


def make_query(**options) -> AttentionQuery:
    return AttentionQuery(6, 2, 32, 32, "float32", "float32", 32**-0.5, **options)


@pytest.fixture(params=NAMES)
def make(request, bind):
    def make(query: AttentionQuery):
        try:
            return bind("paged_attention", query, request.param)
        except SelectionError as error:
            pytest.skip(str(error))

    return make


class Sequence:
    """One sequence's q, k, v of all positions, fed to an implementation in steps of any length."""

    def __init__(self, op, length: int, seed: int = 0) -> None:
        self.op, self.length = op, length
        query = op.query
        generator = torch.Generator().manual_seed(seed)
        shape = (length, query.q_heads + 2 * query.kv_heads, query.head_dim)
        self.qkv = torch.randn(shape, generator=generator)
        self.size = cases.block_sizes(op)[0]
        self.table = scattered_blocks(Requests(((length, length),)), self.size, seed)
        device = op.runtime.device
        self.caches = make_caches(op, self.size, 1 + int(self.table.max()), device)

    def run(self, *cuts: int) -> torch.Tensor:
        heads = self.op.query.q_heads, self.op.query.kv_heads, self.op.query.kv_heads
        results, start = [], 0
        for stop in (*cuts, self.length):
            q, k, v = self.qkv[start:stop].split(heads, dim=1)
            batch = make_batch(Requests(((stop, stop - start),)), self.table, self.size, q.device)
            plan = self.op.plan(batch, 0)
            self.op.write(k, v, *self.caches, plan)
            results.append(self.op.attend(q, *self.caches, plan))
            start = stop
        return torch.cat(results)


@pytest.mark.parametrize("window", [0, 5, 16, 40])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_chunks_do_not_change_the_result(make, window, softcap):
    op = make(make_query(window=window, softcap=softcap))
    whole = Sequence(op, 100).run()
    for cuts in ((1,), (16, 32), (17, 50, 51), tuple(range(90, 100))):
        torch.testing.assert_close(Sequence(op, 100).run(*cuts), whole, rtol=1e-4, atol=1e-5)


def test_small_pieces_equal_large_ones(make, monkeypatch):
    """The bounds on masks, scores and gathered keys only cut the work."""
    for options in ({}, {"window": 20}, {"softcap": 5.0}, {"window": 20, "softcap": 5.0}):
        op = make(make_query(**options))
        whole = Sequence(op, 130).run(60, 127, 128, 129)
        with monkeypatch.context() as patch:
            for name, value in (
                ("MASK_BUDGET", 1000),
                ("SCORE_BUDGET", 4000),
                ("KEY_BUDGET", 3000),
                ("WINDOW_STEP", 7),
            ):
                patch.setattr(cpu_attention, name, value)
            patch.setattr("headrace.platforms.reference.attention.SCORE_BUDGET", 5000)
            cut = Sequence(op, 130).run(60, 127, 128, 129)
        torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-5)


def test_skipped_slots_are_not_written(make):
    op = make(make_query())
    size = cases.block_sizes(op)[0]
    requests = Requests(((1, 1), (20, 20)), padding=1)
    batch = make_batch(requests, scattered_blocks(requests, size, 0), size, op.runtime.device)
    batch.slot_mappings[0][[0, 5, 20]] = -1
    caches = make_caches(op, size, 8, op.runtime.device)
    for cache in caches:
        cache.fill_(7.0)
    k = torch.randn(22, 2, 32)
    op.write(k, k.clone(), *caches, op.plan(batch, 0))
    written = {int(slot) for slot in batch.slot_mappings[0] if slot >= 0}
    keys = caches[0].transpose(1, 2).flatten(0, 1)  # [P * S, H, D]
    touched = {slot for slot in range(len(keys)) if not bool((keys[slot] == 7.0).all())}
    assert written <= touched
    # what is cleared besides lies behind the sequences, in the blocks they begin
    blocks = {slot // size for slot in written}
    assert {slot // size for slot in touched} == blocks


def test_the_result_goes_where_it_is_asked_to(make):
    op = make(make_query())
    sequence = Sequence(op, 20)
    q, k, v = sequence.qkv.split((6, 2, 2), dim=1)
    batch = make_batch(Requests(((20, 20),)), sequence.table, sequence.size, q.device)
    plan = op.plan(batch, 0)
    op.write(k, v, *sequence.caches, plan)
    out = torch.full((20, 6, 32), torch.nan)
    result = op.attend(q, *sequence.caches, plan, out=out)
    assert result.data_ptr() == out.data_ptr()
    assert torch.equal(out, Sequence(op, 20).run())


def test_formats(make):
    op = make(make_query())
    formats = type(op).kv_formats(op.query)
    assert formats and all(set(fmt.layout) == set(CANONICAL) for fmt in formats)
    for fmt in formats:
        assert fmt.accepts(fmt.preferred_block_size)


def test_an_answer_does_not_depend_on_batch_mates(make):
    """Four sequences in a history step and a mixed step: together, and each alone."""
    op = make(make_query(window=30))
    size, lengths = cases.block_sizes(op)[0], ((40, 1), (7, 1), (33, 10), (64, 63))
    table = scattered_blocks(Requests(lengths), size, 1)
    tokens = [torch.randn(total, 10, 32) for total, _ in lengths]

    def attend(chosen: list[int]) -> list[torch.Tensor]:
        caches = make_caches(op, size, 1 + int(table.max()), op.runtime.device)
        history = Requests(tuple((lengths[i][0] - lengths[i][1],) * 2 for i in chosen))
        for requests in (history, Requests(tuple(lengths[i] for i in chosen))):
            steps = zip(chosen, requests.lengths, strict=True)
            new = [tokens[i][total - count : total] for i, (total, count) in steps]
            q, k, v = torch.cat(new).split((6, 2, 2), dim=1)
            plan = op.plan(make_batch(requests, table[chosen], size, q.device), 0)
            op.write(k, v, *caches, plan)
            result = op.attend(q, *caches, plan)
        return list(result.split([len(part) for part in new]))

    together = attend([0, 1, 2, 3])
    for i in range(4):
        torch.testing.assert_close(attend([i])[0], together[i], rtol=1e-4, atol=1e-5)
