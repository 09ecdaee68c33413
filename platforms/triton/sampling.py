"""Sampling without sorting. Contract: headrace.platforms.ops, "sample".

Tokens are ordered by a key, the bits of their scaled logit as an integer that grows with it; a prefix of the order is
a key and how many tokens of just that key belong to it, lowest ids first. Every filter, and the draw itself, asks for
the largest key whose tokens and those above it have some mass or number: found by narrowing the range of keys to a
quarter with every pass over the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import SampleQuery
from headrace.platforms.triton.launch import Launcher, launch_options

OPTIONS = {"BLOCK": 4096, "num_warps": 16}
PASSES = tl.constexpr(16)  # a quarter of 2^32 keys each: one is left
LOWEST = tl.constexpr(-2139095041)  # the key of -inf
MANY = tl.constexpr(1 << 30)  # more tokens than there are


@triton.jit
def _scaled(row, start, V, temperature, BLOCK: tl.constexpr):
    """Logits of a block divided by the temperature; -0 is 0, and what is not there is -inf."""
    at = start + tl.arange(0, BLOCK)
    logits = tl.load(row + at, mask=at < V, other=float("-inf"))
    return tl.div_rn(logits, tl.zeros([BLOCK], tl.float32) + temperature) + 0.0


@triton.jit
def _key(scaled):
    """int64 that is ordered as the float32 values are."""
    bits = scaled.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    """The float32 of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(scaled, top, MASS: tl.constexpr):
    if MASS:
        return tl.exp(scaled - top).to(tl.float64)
    else:
        return (scaled > float("-inf")).to(tl.float64)


@triton.jit
def _count(number):
    """A float64 as a number of tokens, at least 1."""
    return tl.minimum(tl.maximum(number, 1.0), 1.0 * MANY).to(tl.int32)


@triton.jit
def _search(
    row, V, temperature, top, goal, MASS: tl.constexpr, STRICT: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key whose tokens, with all above it, weigh at least `goal`: more than it if STRICT."""
    low = tl.full([], -(2**31), tl.int64)
    width = tl.full([], 2**32, tl.int64)
    for _ in range(PASSES):
        width = (width + 3) // 4
        first = tl.zeros([BLOCK], tl.float64)
        second = tl.zeros([BLOCK], tl.float64)
        third = tl.zeros([BLOCK], tl.float64)
        for start in range(0, V, BLOCK):
            scaled = _scaled(row, start, V, temperature, BLOCK)
            key = _key(scaled)
            weight = _weights(scaled, top, MASS)
            first += tl.where(key >= low + width, weight, 0.0)
            second += tl.where(key >= low + 2 * width, weight, 0.0)
            third += tl.where(key >= low + 3 * width, weight, 0.0)
        for above in tl.static_range(3):
            part = first if above == 0 else (second if above == 1 else third)
            total = tl.sum(part, axis=0)
            holds = total > goal if STRICT else total >= goal
            if above == 0:
                steps = holds.to(tl.int64)
            else:
                steps += holds.to(tl.int64)
        low += steps * width
    return low


@triton.jit
def _above(row, V, temperature, top, edge, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """What the tokens above a key weigh, and how many have just that key."""
    weight = tl.zeros([BLOCK], tl.float64)
    equal = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        scaled = _scaled(row, start, V, temperature, BLOCK)
        key = _key(scaled)
        weight += tl.where(key > edge, _weights(scaled, top, MASS), 0.0)
        at = start + tl.arange(0, BLOCK)
        equal += ((key == edge) & (at < V)).to(tl.int32)
    return tl.sum(weight, axis=0), tl.sum(equal, axis=0)


@triton.jit
def _greatest(row, V, BLOCK: tl.constexpr):
    """The largest logit and the lowest id that has it."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.arange(0, BLOCK)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logits = tl.load(row + at, mask=at < V, other=float("-inf"))
        better = logits > best
        best = tl.where(better, logits, best)
        where = tl.where(better, at, where)
    most = tl.max(best, axis=0)
    return most, tl.min(tl.where(best == most, where, V - 1), axis=0)


@triton.jit
def sample_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, ids, stride, V, BLOCK: tl.constexpr
):
    """ids[r] for row r, one program a row."""
    request = tl.program_id(0).to(tl.int64)
    row = logits + request * stride
    most, chosen = _greatest(row, V, BLOCK)
    temperature = tl.load(temperatures + request)
    if temperature > 0:
        top = tl.div_rn(most, temperature) + 0.0
        edge = tl.full([], LOWEST, tl.int64)  # the kept prefix: keys above `edge` ...
        ties = tl.full([], MANY, tl.int32)  # ... and so many with it
        k = tl.load(top_ks + request)
        if (k > 0) & (k < V):
            edge = _search(row, V, temperature, top, k.to(tl.float64), False, False, BLOCK)
            number, _ = _above(row, V, temperature, top, edge, False, BLOCK)
            ties = k - number.to(tl.int32)
        left, equal = _above(row, V, temperature, top, edge, True, BLOCK)
        left += tl.minimum(ties, equal) * tl.exp(_value(edge) - top).to(tl.float64)
        top_p = tl.load(top_ps + request)
        if top_p < 1:
            goal = tl.maximum(top_p.to(tl.float64) * left, 1e-300)
            found = _search(row, V, temperature, top, goal, True, False, BLOCK)
            if found >= edge:
                mass, _ = _above(row, V, temperature, top, found, True, BLOCK)
                one = tl.exp(_value(found) - top).to(tl.float64)
                needed = _count(tl.ceil((goal - mass) / tl.maximum(one, 1e-300)))
                ties = tl.minimum(needed, tl.where(found == edge, ties, needed))
                edge = found
        min_p = tl.load(min_ps + request)
        if min_p > 0:
            least = _likely(row, V, temperature, top, min_p, BLOCK)
            if least > edge:
                edge = least
                ties = tl.full([], MANY, tl.int32)
        kept, equal = _above(row, V, temperature, top, edge, True, BLOCK)
        ties = tl.minimum(ties, equal)
        kept += ties * tl.exp(_value(edge) - top).to(tl.float64)
        goal = tl.load(uniforms + request).to(tl.float64) * kept
        found = _search(row, V, temperature, top, goal, True, True, BLOCK)
        found = tl.maximum(found, edge)
        mass, equal = _above(row, V, temperature, top, found, True, BLOCK)
        one = tl.exp(_value(found) - top).to(tl.float64)
        rank = _count(tl.floor((goal - mass) / tl.maximum(one, 1e-300)) + 1)
        rank = tl.minimum(rank, tl.where(found == edge, ties, equal))
        chosen = _nth(row, V, temperature, found, rank, chosen, BLOCK)
    tl.store(ids + request, chosen.to(tl.int64))


@triton.jit
def _likely(row, V, temperature, top, min_p, BLOCK: tl.constexpr):
    """The smallest key whose mass is at least `min_p`, the largest mass being 1."""
    least = tl.full([BLOCK], 2**31 - 1, tl.int64)
    for start in range(0, V, BLOCK):
        scaled = _scaled(row, start, V, temperature, BLOCK)
        likely = tl.exp(scaled - top) >= min_p
        least = tl.where(likely, tl.minimum(least, _key(scaled)), least)
    return tl.minimum(tl.min(least, axis=0), _key(top))


@triton.jit
def _nth(row, V, temperature, key, rank, otherwise, BLOCK: tl.constexpr):
    """The id of the rank-th token, from 1, among those with a key."""
    seen = tl.zeros([], tl.int32)
    chosen = otherwise
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = ((_key(_scaled(row, start, V, temperature, BLOCK)) == key) & (at < V)).to(tl.int32)
        count = tl.sum(here, axis=0)
        if (seen < rank) & (seen + count >= rank):
            order = tl.cumsum(here, axis=0) + seen
            chosen = tl.min(tl.where((here > 0) & (order == rank), at, V - 1), axis=0)
        seen += count
    return chosen


class Sample:
    """Nothing is read back: every row's filters are decided on the device."""

    def __init__(self, query: SampleQuery, runtime: DeviceRuntime) -> None:
        options = launch_options("sample", query, runtime, OPTIONS)
        self._launch = Launcher(sample_kernel, options)

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        rows, vocab = logits.shape
        ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if rows:
            if logits.stride(1) != 1:
                logits = logits.contiguous()
            tensors = (logits, temperature, top_k, top_p, min_p, uniform, ids)
            self._launch((rows, 1, 1), *tensors, logits.stride(0), vocab)
        return ids
