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
def keys(values, at, E: tl.constexpr, E_PAD: tl.constexpr):
    """Integers in the order of (value, falling id)."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0 is 0
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * 4294967296 + (E_PAD - 1 - at)
    return tl.where(at < E, key, TAKEN)


@triton.jit
def within_groups(
    choice, at, E: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    PAIRS: tl.constexpr, E_PAD: tl.constexpr, G_PAD: tl.constexpr,
):  # fmt: skip
    """-inf for experts outside of the TOP_GROUPS groups with the largest value, or with PAIRS sum of two."""
    group, place = at // (E // GROUPS), tl.arange(0, G_PAD)
    sums = tl.full([G_PAD], float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        own = tl.where((group == g) & (at < E), choice, float("-inf"))
        best = tl.max(own, axis=0)
        if PAIRS:
            first = tl.min(tl.where(own == best, at, E_PAD), axis=0)
            best += tl.max(tl.where(at == first, float("-inf"), own), axis=0)
        sums = tl.where(place == g, best, sums)
    kept = at < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(sums, axis=0)
        taken = tl.min(tl.where(sums == best, place, G_PAD), axis=0)
        sums = tl.where(place == taken, float("-inf"), sums)
        kept |= group == taken
    return tl.where(kept, choice, float("-inf"))


@triton.jit
def route_kernel(
    logits, bias, weights, ids, stride, E: tl.constexpr, TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, SCALE: tl.constexpr, E_PAD: tl.constexpr, K_PAD: tl.constexpr,
    G_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token's experts by what topk_softmax_kernel leaves out: other scores, a bias, groups, a scale."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, E_PAD)
    let_next_start(PDL)
    after_previous(PDL)
    row = tl.load(logits + token * stride + at, mask=at < E, other=float("-inf"))
    known = tl.where(row == row, row, float("-inf"))  # NaN comes last
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-known))
        choice = score
    else:
        top = tl.max(known, axis=0)
        score = tl.exp(known - top)
        score = score / tl.sum(score, axis=0)
        choice = known  # in the order of their softmax
    if BIAS:
        choice = score + tl.load(bias + at, mask=at < E, other=0.0)
        choice = tl.where(choice == choice, choice, float("-inf"))
    if GROUPS > 1:
        choice = within_groups(choice, at, E, GROUPS, TOP_GROUPS, BIAS, E_PAD, G_PAD)
    key = keys(choice, at, E, E_PAD)
    place = tl.arange(0, K_PAD)
    chosen = tl.zeros([K_PAD], tl.int32)
    share = tl.zeros([K_PAD], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(key, axis=0)
        key = tl.where(key == best, TAKEN, key)
        expert = E_PAD - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        chosen = tl.where(place == k, expert, chosen)
        share = tl.where(place == k, tl.sum(tl.where(at == expert, score, 0.0), axis=0), share)
    if RENORMALIZE:
        share = share / tl.sum(share, axis=0)
    # a row with NaN has weights of NaN, so that it is not taken for a good one
    wrong = tl.max(tl.where(row == row, 0, 1), axis=0) > 0
    share = tl.where(wrong, float("nan"), share * SCALE)
    tl.store(weights + token * TOP_K + place, share, mask=place < TOP_K)
    tl.store(ids + token * TOP_K + place, chosen, mask=place < TOP_K)


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
    known = tl.where(row == row, row, float("-inf"))  # NaN comes last
    key = keys(known, at, E, E_PAD)
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
    chosen: dict[str, Any] = {
        "E": query.experts,
        "TOP_K": query.top_k,
        "RENORMALIZE": query.renormalize,
        "E_PAD": padded,
        "K_PAD": power_of_two(query.top_k),
        "num_warps": max(1, padded // 512),
    }
    if not query.plain:
        chosen |= {
            "SIGMOID": query.scoring == "sigmoid",
            "BIAS": query.bias,
            "GROUPS": query.groups,
            "TOP_GROUPS": query.top_groups,
            "SCALE": query.scale,
            "G_PAD": power_of_two(query.groups),
        }
    return launch_options("topk_softmax", query, runtime, chosen, dependent=True)


class TopkSoftmax:
    def __init__(self, query: RouterQuery, runtime: DeviceRuntime) -> None:
        self._top_k = query.top_k
        self._plain = query.plain
        kernel = topk_softmax_kernel if query.plain else route_kernel
        self._launch = Launcher(kernel, options(query, runtime))

    def __call__(
        self,
        logits: torch.Tensor,
        top_k: int,
        renormalize: bool,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, device = logits.shape[0], logits.device
        weights = torch.empty(tokens, self._top_k, dtype=torch.float32, device=device)
        ids = torch.empty(tokens, self._top_k, dtype=torch.int32, device=device)
        if tokens:
            given = (logits,) if self._plain else (logits, logits if bias is None else bias)
            self._launch((tokens, 1, 1), *given, weights, ids, logits.stride(0))
        return weights, ids
