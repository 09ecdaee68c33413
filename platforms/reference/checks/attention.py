"""Paged attention: chunks, batches, skipped slots, KV formats, captured steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from headrace.platforms.attention import PagedAttention
from headrace.platforms.batch import BatchView
from headrace.platforms.graph import GraphKey, GraphSupport
from headrace.platforms.kv_layout import CANONICAL
from headrace.platforms.queries import AttentionQuery
from headrace.platforms.reference.cases import (
    Requests,
    block_sizes,
    make_batch,
    make_caches,
    scattered_blocks,
)
from headrace.platforms.reference.checks.base import (
    Make,
    NothingToCheck,
    OpCheck,
    close,
    require,
    same,
)

HEADS, KV_HEADS, SIZE = 6, 2, 64
SPLIT = (HEADS, KV_HEADS, KV_HEADS)
CUTS = ((1,), (16, 32), (17, 50, 51), tuple(range(90, 100)))


def make_query(dtype: str = "float32", **options: Any) -> AttentionQuery:
    if options.get("latent"):
        return AttentionQuery(HEADS, 1, SIZE + 16, SIZE, dtype, dtype, SIZE**-0.5, **options)
    return AttentionQuery(HEADS, KV_HEADS, SIZE, SIZE, dtype, dtype, SIZE**-0.5, **options)


def random_tokens(op: PagedAttention, count: int, seed: int = 0) -> torch.Tensor:
    """q, k and v of `count` tokens side by side, [T, Hq + 2 * Hkv, D], on the op's device."""
    query = op.query
    shape = (count, query.q_heads + 2 * query.kv_heads, query.head_dim)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(op.runtime.device, getattr(torch, query.dtype))


def parts(query: AttentionQuery, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v of such rows."""
    q, k, v = rows.split((query.q_heads, query.kv_heads, query.kv_heads), dim=1)
    return q, k, k[..., : query.v_head_dim] if query.latent else v


class Sequence:
    """One sequence's q, k, v of all positions, fed to an implementation in steps of any length."""

    def __init__(self, op: PagedAttention, length: int, seed: int = 0) -> None:
        self.op, self.length = op, length
        self.qkv = random_tokens(op, length, seed)
        self.size = block_sizes(op)[0]
        self.table = scattered_blocks(Requests(((length, length),)), self.size, seed)
        device = op.runtime.device
        self.caches = make_caches(op, self.size, 1 + int(self.table.max()), device)

    def run(self, *cuts: int) -> torch.Tensor:
        results, start = [], 0
        for stop in (*cuts, self.length):
            q, k, v = parts(self.op.query, self.qkv[start:stop])
            batch = make_batch(Requests(((stop, stop - start),)), self.table, self.size, q.device)
            plan = self.op.plan(batch, 0)
            self.op.write(k, v, *self.caches, plan)
            results.append(self.op.attend(q, *self.caches, plan))
            start = stop
        return torch.cat(results)


def chunks_do_not_change_the_result(make: Make, dtype: str, **options: Any) -> None:
    op = make(make_query(dtype, **options))
    whole = Sequence(op, 100).run()
    for cuts in CUTS:
        close(Sequence(op, 100).run(*cuts), whole, dtype, f"cut at {cuts[:3]} and whole")


def skipped_slots_are_not_written(make: Make, dtype: str) -> None:
    op = make(make_query(dtype))
    device, size = op.runtime.device, block_sizes(op)[0]
    requests = Requests(((1, 1), (20, 20)), padding=1)
    batch = make_batch(requests, scattered_blocks(requests, size, 0), size, device)
    batch.slot_mappings[0][torch.tensor([0, 5, 20], device=device)] = -1
    caches = make_caches(op, size, 8, device)
    for cache in caches:
        cache.fill_(7.0)
    _, k, v = random_tokens(op, 22).split(SPLIT, dim=1)
    op.write(k, v, *caches, op.plan(batch, 0))
    written = {int(slot) for slot in batch.slot_mappings[0].cpu() if slot >= 0}
    keys = caches[0].cpu().transpose(1, 2).flatten(0, 1)  # [P * S, H, D]
    touched = {slot for slot in range(len(keys)) if not bool((keys[slot] == 7.0).all())}
    require(written <= touched, f"slots {sorted(written - touched)} were not written")
    # what is written besides lies behind the sequences, in the blocks they begin, or in the dummy block
    blocks = {0, *(slot // size for slot in written)}
    wrong = {slot // size for slot in touched} - blocks
    require(not wrong, f"blocks {sorted(wrong)} were written to and belong to nobody")


def the_result_goes_where_it_is_asked_to(make: Make, dtype: str) -> None:
    op = make(make_query(dtype))
    sequence = Sequence(op, 20)
    q, k, v = sequence.qkv.split(SPLIT, dim=1)
    batch = make_batch(Requests(((20, 20),)), sequence.table, sequence.size, q.device)
    plan = op.plan(batch, 0)
    op.write(k, v, *sequence.caches, plan)
    out = torch.full((20, HEADS, SIZE), torch.nan, dtype=q.dtype, device=q.device)
    result = op.attend(q, *sequence.caches, plan, out=out)
    require(result.data_ptr() == out.data_ptr(), "the result is not in `out`")
    same(out, Sequence(op, 20).run(), "with `out` and without")


def formats_are_in_order(make: Make, dtype: str) -> None:
    op = make(make_query(dtype))
    formats = type(op).kv_formats(op.query)
    require(bool(formats), "no KV format is offered")
    for fmt in formats:
        require(set(fmt.layout) == set(CANONICAL), f"layout {fmt.layout} has other axes")
        size = fmt.preferred_block_size
        require(fmt.accepts(size), f"the preferred block size {size} is not accepted")


def batch_mates_do_not_matter(make: Make, dtype: str, **options: Any) -> None:
    """Four sequences in a history step and a mixed step: together, and each alone."""
    op = make(make_query(dtype, **options))
    size, lengths = block_sizes(op)[0], ((40, 1), (7, 1), (33, 10), (64, 63))
    table = scattered_blocks(Requests(lengths), size, 1)
    tokens = [random_tokens(op, total, i) for i, (total, _) in enumerate(lengths)]

    def attend(chosen: list[int]) -> list[torch.Tensor]:
        caches = make_caches(op, size, 1 + int(table.max()), op.runtime.device)
        history = Requests(tuple((lengths[i][0] - lengths[i][1],) * 2 for i in chosen))
        for requests in (history, Requests(tuple(lengths[i] for i in chosen))):
            steps = zip(chosen, requests.lengths, strict=True)
            new = [tokens[i][total - count : total] for i, (total, count) in steps]
            q, k, v = parts(op.query, torch.cat(new))
            plan = op.plan(make_batch(requests, table[chosen], size, q.device), 0)
            op.write(k, v, *caches, plan)
            result = op.attend(q, *caches, plan)
        return list(result.split([len(part) for part in new]))

    together = attend([0, 1, 2, 3])
    for i in range(4):
        close(attend([i])[0], together[i], dtype, f"sequence {i} alone and in a batch")


class _Static:
    """Buffers of fixed address, as the engine gives them to a plan that will be replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name not in self._tensors:
            self._tensors[name] = torch.empty(shape, dtype=dtype, device=self._device)
        return self._tensors[name]


def replays_follow_the_buffers(
    make: Make,
    dtype: str,
    lengths: tuple[tuple[tuple[int, int], ...], ...],
    least: GraphSupport,
    **options: Any,
) -> None:
    """A captured step, replayed for other sequences than it was captured with. `lengths`: keys and new tokens of each
    request, the same number of tokens in all; `least`: what an implementation must be able to capture."""
    op = make(make_query(dtype, graph=True, **options))
    if op.graph < least:
        raise NothingToCheck("its steps of this kind are not captured")
    runtime, size = op.runtime, block_sizes(op)[0]
    device = runtime.device
    first, then = (Requests(each) for each in lengths)
    tokens = sum(new for _, new in lengths[0])
    width = -(-300 // size)
    tables = {}
    for requests in (first, then):
        tables[requests] = np.zeros((2, width), np.int32)
        made = scattered_blocks(requests, size, 5)
        tables[requests][:, : made.shape[1]] = made
    stream = runtime.stream()
    with torch.inference_mode(), runtime.use_stream(stream):
        caches = make_caches(op, size, 2 * width + 1, device)
        for cache in caches:
            drawn = torch.randn(cache.shape, generator=torch.Generator().manual_seed(1))
            cache.copy_(drawn.to(device, cache.dtype))
        q, k, v = parts(op.query, random_tokens(op, tokens))
        static, batch = _Static(device), make_batch(first, tables[first], size, device)
        held: list[Any] = [None]
        results: list[torch.Tensor] = [q]

        def plan(view: BatchView) -> None:
            held[0] = op.plan(view, 0, static)

        def body() -> None:
            op.write(k, v, *caches, held[0])
            results[0] = op.attend(q, *caches, held[0])

        plan(batch)
        body()  # kernels are loaded and tuned outside of the capture
        plan(batch)
        backend = runtime.graphs()
        with backend.session():
            graph = backend.capture(GraphKey("step", 2, tokens), body, batch.host_args())
        captured = results[0]
        for requests in (then, first):
            other = make_batch(requests, tables[requests], size, device)
            _become(batch, other)
            plan(batch)
            graph.replay(batch.host_args())
            runtime.synchronize()
            replayed = captured.clone() if captured is results[0] else results[0].clone()
            want_plan = op.plan(other, 0)
            op.write(k, v, *caches, want_plan)
            close(replayed, op.attend(q, *caches, want_plan), dtype, "replayed and computed")
        runtime.synchronize()
        graph.release()


def _become(batch: BatchView, other: BatchView) -> None:
    """Other numbers in the same device tensors."""
    batch.max_seq_len = other.max_seq_len
    batch.seq_lens.copy_(other.seq_lens)
    batch.query_start_loc.copy_(other.query_start_loc)
    batch.block_tables[0].copy_(other.block_tables[0])
    batch.slot_mappings[0].copy_(other.slot_mappings[0])
    batch.seq_lens_host, batch.query_start_loc_host = (
        other.seq_lens_host,
        other.query_start_loc_host,
    )
    batch.block_tables_host = other.block_tables_host


CHECKS: dict[str, OpCheck] = {
    **{
        f"chunks do not change the result: window {window}, soft cap {softcap:g}": partial(
            chunks_do_not_change_the_result, window=window, softcap=softcap
        )
        for window in (0, 5, 16, 40)
        for softcap in (0.0, 5.0)
    },
    "skipped slots are not written": skipped_slots_are_not_written,
    "the result goes where it is asked to": the_result_goes_where_it_is_asked_to,
    "formats are in order": formats_are_in_order,
    "batch mates do not matter": partial(batch_mates_do_not_matter, window=30),
    "chunks do not change the result: latent": partial(
        chunks_do_not_change_the_result, latent=True
    ),
    "batch mates do not matter: latent": partial(batch_mates_do_not_matter, latent=True),
    **{
        f"replays of {kind} follow the buffers{': latent' if latent else ''}": partial(
            replays_follow_the_buffers, lengths=lengths, least=least, latent=latent
        )
        for kind, lengths, least in (
            ("decodes", (((40, 1), (70, 1)), ((300, 1), (9, 1))), GraphSupport.DECODE_ONE),
            ("prompts", (((150, 150), (42, 42)), ((300, 191), (1, 1))), GraphSupport.ALWAYS),
        )
        for latent in (False, True)
    },
}
