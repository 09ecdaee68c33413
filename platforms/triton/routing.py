"""The router of a mixture of experts. Contract: headrace.platforms.ops, "topk_softmax"."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import RouterQuery
from headrace.platforms.triton.launch import (
    Launcher,
    after_previous,
    launch_options,
    let_next_start,
    power_of_two,
)

TAKEN = tl.constexpr(-(2**63))  # below the key of every logit


@triton.jit
def topk_softmax_kernel(
    logits, weights, ids, stride, E: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr,
    E_PAD: tl.constexpr, K_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token's experts, taken one after the other by a key that is ordered as (logit, falling id) is."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, E_PAD)
    let_next_start(PDL)
    after_previous(PDL)
    row = tl.load(logits + token * stride + at, mask=at < E, other=float("-inf"))
    known = tl.where(row == row, row, float("-inf")) + 0.0  # NaN comes last; -0 is 0
    bits = known.to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * 4294967296 + (E_PAD - 1 - at)
    key = tl.where(at < E, key, TAKEN)
    place = tl.arange(0, K_PAD)
    chosen = tl.zeros([K_PAD], tl.int32)
    score = tl.full([K_PAD], float("-inf"), tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(key, axis=0)
        key = tl.where(key == best, TAKEN, key)
        low = (best & 0xFFFFFFFF).to(tl.int32)
        high = (best >> 32).to(tl.int32)
        value = (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        chosen = tl.where(place == k, E_PAD - 1 - low, chosen)
        score = tl.where(place == k, value, score)
    top = tl.max(score, axis=0)
    # a row with NaN has weights of NaN, so that it is not taken for a good one
    share = tl.exp(score - top) / tl.sum(tl.exp(row - top), axis=0)
    if RENORMALIZE:
        share = share / tl.sum(share, axis=0)
    tl.store(weights + token * TOP_K + place, share, mask=place < TOP_K)
    tl.store(ids + token * TOP_K + place, chosen, mask=place < TOP_K)


def options(query: RouterQuery, runtime: DeviceRuntime) -> dict[str, Any]:
    padded = power_of_two(query.experts, 32)
    chosen = {
        "E": query.experts,
        "TOP_K": query.top_k,
        "RENORMALIZE": query.renormalize,
        "E_PAD": padded,
        "K_PAD": power_of_two(query.top_k),
        "num_warps": max(1, padded // 512),
    }
    return launch_options("topk_softmax", query, runtime, chosen, dependent=True)


class TopkSoftmax:
    def __init__(self, query: RouterQuery, runtime: DeviceRuntime) -> None:
        self._top_k = query.top_k
        self._launch = Launcher(topk_softmax_kernel, options(query, runtime))

    def __call__(
        self, logits: torch.Tensor, top_k: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, device = logits.shape[0], logits.device
        weights = torch.empty(tokens, self._top_k, dtype=torch.float32, device=device)
        ids = torch.empty(tokens, self._top_k, dtype=torch.int32, device=device)
        if tokens:
            self._launch((tokens, 1, 1), logits, weights, ids, logits.stride(0))
        return weights, ids
