"""Whether other implementations of paged attention than the one in use are faster on this device, for one model's
queries. One that wins is entered beside the launch options (platforms.tuned), and the next start takes it.

Timed is what a layer does: its queries and keys turned and written, and the attention to them, without the host's part,
as in a replayed graph. A rival wins when it is faster over all loads by the margin of launch options, twice, and slower
by that in none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from headrace.platforms.attention import PagedAttention, Turn
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.ops import Ops
from headrace.platforms.queries import AttentionQuery, RotaryQuery
from headrace.platforms.reference.cases import Requests, make_batch, make_caches, scattered_blocks
from headrace.platforms.registry import REFERENCE, Policy, Registry, Requirement, SelectionError
from headrace.platforms.triton.tuning import (
    DECODES,
    MARGIN,
    MOST_COPIES,
    PREFILL,
    READ_BYTES,
    Call,
    Timer,
)

OP = "paged_attention"
LOADS = (*DECODES, PREFILL)  # requests, keys and new tokens of each


@dataclass(frozen=True, slots=True)
class Contest:
    """Seconds of a layer with the implementation in use and with another one, a load each."""

    query: AttentionQuery
    used: str
    rival: str
    requires: tuple[Requirement, ...] = ()
    now: Sequence[float] = ()
    took: Sequence[float] = ()
    won: bool = False
    note: str = ""


class _Fixed:
    """Buffers of fixed address, for plans that are replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name not in self._made:
            self._made[name] = torch.empty(shape, dtype=dtype, device=self._device)
        return self._made[name]


def contests(
    queries: Sequence[tuple[str, Any]],
    registry: Registry,
    policy: Policy,
    runtime: DeviceRuntime,
    timer: Timer,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Contest]:
    """Of the (op, query) pairs, those of paged attention with every implementation that could serve them, each loaded
    and tested first. None where the user has forced one. SelectionError where nothing serves a query at all."""
    rows = {row.name: row for row in registry.candidates(OP)}
    own = Ops(registry, runtime.info, runtime, policy)
    asked = dict.fromkeys(query for op, query in queries if op == OP and not query.latent)
    for query in asked if OP not in policy.force else ():
        used = own.bind(OP, query)
        decision = next(one for one in own.report.decisions if one.query == query)
        for candidate in decision.candidates:
            if candidate.status == "no" or candidate.name in (decision.chosen, REFERENCE):
                continue
            progress(f"{OP} by {candidate.name}")
            requires = rows[candidate.name].requires
            contest = Contest(query, decision.chosen, candidate.name, requires)
            forced = dataclasses.replace(policy, force={**policy.force, OP: candidate.name})
            try:
                rival = Ops(registry, runtime.info, runtime, forced).bind(OP, query)
                yield held(contest, used, rival, timer)
            except (SelectionError, RuntimeError, MemoryError) as error:
                yield dataclasses.replace(contest, note=str(error).splitlines()[0])


def held(contest: Contest, used: PagedAttention, rival: PagedAttention, timer: Timer) -> Contest:
    for _ in range(2):  # once more: a first success may be luck
        now, took = ([timer(calls(op, load))[0] for load in LOADS] for op in (used, rival))
        won = faster(now, took)
        if not won:
            break
    return dataclasses.replace(contest, now=now, took=took, won=won)


def faster(now: Sequence[float], took: Sequence[float]) -> bool:
    """Loads count alike."""
    ratios = [new / old for new, old in zip(took, now, strict=True)]
    whole = prod(ratios) ** (1 / len(ratios))
    return whole <= 1 - MARGIN and max(ratios) < 1 + MARGIN


def calls(op: PagedAttention, load: tuple[int, int, int]) -> list[Call]:
    """A layer's work over caches that no cache of the device holds together."""
    query, device = op.query, op.runtime.device
    requests, keys, new = load
    size = type(op).kv_formats(query)[0].preferred_block_size
    steps = Requests(((keys, new),) * requests)
    table = scattered_blocks(steps, size, 0)
    batch = make_batch(steps, table, size, device)
    dtype = getattr(torch, query.dtype)
    nbytes = 2 * requests * keys * query.kv_heads * query.head_dim * dtype.itemsize
    count = min(8, max(2, min(MOST_COPIES, READ_BYTES // nbytes)))
    caches = [make_caches(op, size, 1 + int(table.max()), device) for _ in range(count)]
    for cache in (cache for pair in caches for cache in pair):
        if cache.is_floating_point() and cache.element_size() > 1:
            cache.normal_()
    tokens = requests * new
    q, k, v = (
        torch.randn(tokens, heads, width, dtype=dtype, device=device)
        for heads, width in (
            (query.q_heads, query.head_dim),
            (query.kv_heads, query.head_dim),
            (query.kv_heads, query.v_head_dim),
        )
    )
    plan = op.plan(batch, 0, _Fixed(device) if new == 1 else None)
    if not query.sinks and op.turns(RotaryQuery(query.head_dim, query.head_dim, query.dtype)):
        # by no angle, so that what is turned again and again keeps its size
        half = torch.ones(keys, query.head_dim // 2, device=device)
        positions = torch.arange(keys - new, keys, device=device).repeat(requests)
        turn = Turn(positions, torch.cat([half, torch.zeros_like(half)], dim=1))
        return [partial(op.turn_and_attend, q, k, v, turn, pair, plan) for pair in caches]
    sinks = torch.randn(query.q_heads, device=device) if query.sinks else None

    def layer(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        op.write(k, v, k_cache, v_cache, plan)
        return op.attend(q, k_cache, v_cache, plan, sinks=sinks)

    return [partial(layer, *pair) for pair in caches]
