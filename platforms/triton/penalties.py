"""Penalties and token bitmasks on logits, in place. Contracts: headrace.platforms.ops, "penalties", "token_bitmask".

What penalties cost depends on the tokens of a sequence, not on the vocabulary: each is counted at its own place in a
table of zeros, then the first to take the count away changes the logit. Nothing is read back.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import SampleQuery
from headrace.platforms.triton.launch import Launcher, launch_options

OPTIONS = {"BLOCK": 1024, "num_warps": 4}
BITMASK = {"WORDS": 64, "num_warps": 4}
# what a token behind the prompt adds to its count; one of the prompt sets the lowest bit
BEHIND = tl.constexpr(2)


@triton.jit
def _tokens(tokens, sequences, V, stride, BLOCK: tl.constexpr):
    """A block of a sequence: positions, tokens, and which of them count."""
    own = sequences + 4 * tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = at < tl.load(own + 3)
    row = tl.load(own + 1)
    token = tl.load(tokens + row * stride + at, mask=within, other=0)
    return at, token, within & (token >= 0) & (token < V)


@triton.jit
def count_kernel(tokens, sequences, table, V, stride, BLOCK: tl.constexpr):
    """table[i, t]: BEHIND for each time that token t is behind the prompt, and 1 if it is in the prompt."""
    at, token, within = _tokens(tokens, sequences, V, stride, BLOCK)
    place = table + tl.program_id(1).to(tl.int64) * V + token
    behind = at >= tl.load(sequences + 4 * tl.program_id(1) + 2)
    ones = tl.full([BLOCK], 1, tl.int32)
    tl.atomic_or(place, ones, mask=within & (behind == 0), sem="relaxed")
    tl.atomic_add(place, ones * BEHIND, mask=within & behind, sem="relaxed")


@triton.jit
def penalties_kernel(
    logits, tokens, sequences, factors, table, V, stride, stride_logits, BLOCK: tl.constexpr
):  # fmt: skip
    """Take each count once, and leave zero in its place."""
    _, token, within = _tokens(tokens, sequences, V, stride, BLOCK)
    sequence = tl.program_id(1).to(tl.int64)
    nothing = tl.zeros([BLOCK], tl.int32)
    # "and" of nothing is an exchange that all compilers know
    count = tl.atomic_and(table + sequence * V + token, nothing, mask=within, sem="relaxed")
    first = within & (count > 0)
    repetition = tl.load(factors + 3 * sequence)
    frequency = tl.load(factors + 3 * sequence + 1)
    presence = tl.load(factors + 3 * sequence + 2)
    place = logits + tl.load(sequences + 4 * sequence) * stride_logits + token
    logit = tl.load(place, mask=first, other=0.0)
    divided = tl.div_rn(logit, tl.zeros([BLOCK], tl.float32) + repetition)
    logit = tl.where(logit > 0, divided, logit * repetition)
    number = count // BEHIND
    logit = logit - frequency * number.to(tl.float32) - tl.where(number > 0, presence, 0.0)
    tl.store(place, logit, mask=first)


@triton.jit
def bitmask_kernel(logits, where, allowed, V, words, stride, WORDS: tl.constexpr):
    """-inf where a bit is 0; what is allowed is neither read nor written."""
    sequence = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(allowed + sequence * words + word, mask=word < words, other=-1)
    bit = tl.arange(0, 32)
    at = word[:, None] * 32 + bit[None, :]
    masked = (((bits[:, None] >> bit[None, :]) & 1) == 0) & (at < V)
    row = logits + tl.load(where + sequence) * stride
    tl.store(row + at, tl.full([WORDS, 32], float("-inf"), tl.float32), mask=masked)


def options(query: SampleQuery, runtime: Any) -> dict[str, Any]:
    return launch_options("penalties", query, runtime, OPTIONS)


def bitmask_options(query: SampleQuery, runtime: Any) -> dict[str, Any]:
    return launch_options("token_bitmask", query, runtime, BITMASK)


class Penalties:
    def __init__(self, query: SampleQuery, runtime: DeviceRuntime) -> None:
        chosen = options(query, runtime)
        self._block = chosen["BLOCK"]
        self._count = Launcher(count_kernel, chosen)
        self._penalise = Launcher(penalties_kernel, chosen)

    def __call__(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        sequences: torch.Tensor,
        factors: torch.Tensor,
        longest: int,
    ) -> None:
        count, vocab = len(sequences), logits.shape[1]
        if not count or not longest:
            return
        table = torch.zeros((count, vocab), dtype=torch.int32, device=logits.device)
        grid = (triton.cdiv(longest, self._block), count, 1)
        stride = tokens.stride(0)
        self._count(grid, tokens, sequences, table, vocab, stride)
        tensors = (logits, tokens, sequences, factors, table)
        self._penalise(grid, *tensors, vocab, stride, logits.stride(0))


class TokenBitmask:
    def __init__(self, query: SampleQuery, runtime: DeviceRuntime) -> None:
        chosen = bitmask_options(query, runtime)
        self._words = chosen["WORDS"]
        self._mask = Launcher(bitmask_kernel, chosen)

    def __call__(self, logits: torch.Tensor, where: torch.Tensor, allowed: torch.Tensor) -> None:
        count, words = allowed.shape
        if count:
            grid = (triton.cdiv(words, self._words), count, 1)
            sizes = (logits.shape[1], words, logits.stride(0))
            self._mask(grid, logits, where, allowed, *sizes)
