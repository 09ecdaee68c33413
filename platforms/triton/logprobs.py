"""Log-probabilities, ranks and the likeliest tokens. Contract: headrace.platforms.ops, "logprobs".

Rows are divided into tiles. One pass over the logits: of each tile the sum of exponentials, how many logits are larger
than the token's own, and its k largest, taken out one after another; then one program a row puts the tiles together.
For k beyond MOST_TOP the largest are found by torch.topk, in passes of its own. Nothing is read back.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import SampleQuery
from headrace.platforms.triton.launch import Launcher, launch_options, power_of_two

BLOCK = 2048  # of a tile
MOST_TOP = 32
TILE = {"num_warps": 4}
ROW = {"num_warps": 4}
ID = tl.constexpr(0x7FFFFFFF)
NOTHING = tl.constexpr(-(2**63))


@triton.jit
def _packed(logits, at):
    """int64 that is ordered as the logits are, the lower id first among equals; NaN is -inf."""
    known = tl.where(logits == logits, logits, float("-inf")) + 0.0
    bits = known.to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return (key << 31) | (at ^ ID)


@triton.jit
def _logit(packed):
    bits = (packed >> 31).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def tile_kernel(
    logits, ids, peaks, sums, larger, best, stride, V, tiles, top, BLOCK: tl.constexpr,
    TOP: tl.constexpr,
):  # fmt: skip
    """peaks, sums, larger [N, tiles] and best [N, tiles, TOP], of which `top` are written."""
    request = tl.program_id(1).to(tl.int64)
    row = logits + request * stride
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(row + at, mask=at < V, other=float("-inf"))
    own = tl.load(row + tl.load(ids + request))
    here = request * tiles + tl.program_id(0)
    peak = tl.max(found, axis=0)
    # a tile of nothing but -inf: its exponentials are of nothing
    shift = tl.where(peak > float("-inf"), peak, 0.0)
    tl.store(peaks + here, peak)
    tl.store(sums + here, tl.sum(tl.exp(found - shift), axis=0))
    tl.store(larger + here, tl.sum((found > own).to(tl.int32), axis=0))
    packed = tl.where(at < V, _packed(found, at), NOTHING)
    for place in range(top):
        most = tl.max(packed, axis=0)
        tl.store(best + here * TOP + place, most)
        packed = tl.where(packed == most, NOTHING, packed)


@triton.jit
def row_kernel(
    logits, ids, peaks, sums, larger, best, own, totals, rank, top_ids, top_logprobs, stride, tiles,
    top, TILES: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """One program a row: own, totals, rank [N] and top_ids, top_logprobs [N, top]."""
    request = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    within = tile < tiles
    here = request * tiles + tile
    peak = tl.load(peaks + here, mask=within, other=float("-inf"))
    most = tl.max(peak, axis=0)
    part = tl.load(sums + here, mask=within, other=0.0) * tl.exp(peak - most)
    total = most + tl.log(tl.sum(tl.where(within, part, 0.0), axis=0))
    logit = tl.load(logits + request * stride + tl.load(ids + request))
    tl.store(own + request, logit - total)
    tl.store(totals + request, total)
    above = tl.sum(tl.load(larger + here, mask=within, other=0), axis=0)
    tl.store(rank + request, above.to(tl.int64) + 1)
    place = tl.arange(0, TOP)
    at = here[:, None] * TOP + place[None, :]
    packed = tl.load(best + at, mask=within[:, None] & (place[None, :] < top), other=NOTHING)
    for index in range(top):
        largest = tl.max(tl.max(packed, axis=1), axis=0)
        tl.store(top_ids + request * top + index, (largest & ID) ^ ID)
        tl.store(top_logprobs + request * top + index, _logit(largest) - total)
        packed = tl.where(packed == largest, NOTHING, packed)


def options(query: SampleQuery, runtime: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the tiles' kernel and of the rows'."""
    tile = launch_options("logprobs_tile", query, runtime, TILE)
    row = launch_options("logprobs_row", query, runtime, ROW)
    constants = {"BLOCK": BLOCK, "TOP": MOST_TOP}
    tiles = power_of_two(triton.cdiv(query.vocab, BLOCK))
    return {**tile, **constants}, {**row, **constants, "TILES": tiles}


class Logprobs:
    def __init__(self, query: SampleQuery, runtime: DeviceRuntime) -> None:
        tile, row = options(query, runtime)
        self._tile, self._row = Launcher(tile_kernel, tile), Launcher(row_kernel, row)

    def __call__(
        self, logits: torch.Tensor, ids: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        (count, vocab), device = logits.shape, logits.device
        few = k if k <= MOST_TOP else 0
        own = torch.empty(count, dtype=torch.float32, device=device)
        totals = torch.empty_like(own)
        rank = torch.empty(count, dtype=torch.int64, device=device)
        top_ids = torch.empty((count, few), dtype=torch.int64, device=device)
        top = torch.empty((count, few), dtype=torch.float32, device=device)
        if count:
            shape = (count, triton.cdiv(vocab, BLOCK))
            peaks = torch.empty(shape, dtype=torch.float32, device=device)
            sums, larger = torch.empty_like(peaks), torch.empty_like(peaks, dtype=torch.int32)
            best = torch.empty((*shape, MOST_TOP), dtype=torch.int64, device=device)
            tiles, stride = shape[1], logits.stride(0)
            tensors = (logits, ids, peaks, sums, larger, best)
            self._tile((tiles, count, 1), *tensors, stride, vocab, tiles, few)
            results = (own, totals, rank, top_ids, top)
            self._row((count, 1, 1), *tensors, *results, stride, tiles, few)
        if few < k:
            largest, top_ids = logits.topk(k, dim=-1)
            top = largest - totals.unsqueeze(1)
        return own, rank, top_ids, top
