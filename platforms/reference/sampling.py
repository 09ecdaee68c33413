"""Sampling by inverse CDF over the sorted vocabulary, and what else is done to logits. Contracts:
headrace.platforms.ops, "sample", "logprobs", "penalties" and "token_bitmask"."""

from __future__ import annotations

import torch


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    mass = (ordered - ordered[:, :1]).exp().double()
    cumulative = mass.cumsum(-1)
    kept = kept_prefix(mass, cumulative, top_k, top_p, min_p)
    chosen = pick(cumulative, kept, uniform)
    return torch.where(greedy, logits.argmax(-1), ids.gather(1, chosen.unsqueeze(1)).squeeze(1))


def kept_prefix(
    mass: torch.Tensor,
    cumulative: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Length [R] int64 of the prefix that all filters keep; mass[:, 0] is 1 and falls. At least 1."""
    vocab = mass.shape[-1]
    k = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k).long()
    left_by_k = cumulative.gather(1, (k - 1).unsqueeze(1))
    short = (cumulative < top_p.double().unsqueeze(1) * left_by_k).sum(-1) + 1
    kept = torch.where(top_p < 1, torch.minimum(k, short), k)
    likely = (mass >= min_p.double().unsqueeze(1)).sum(-1)
    return torch.where(min_p > 0, torch.minimum(kept, likely), kept).clamp(min=1)


def pick(cumulative: torch.Tensor, kept: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index [R] of the first entry whose cumulative mass exceeds uniform * the kept mass."""
    total = cumulative.gather(1, (kept - 1).unsqueeze(1))
    index = torch.searchsorted(cumulative, uniform.double().unsqueeze(1) * total, right=True)
    return torch.minimum(index.squeeze(1), kept - 1)


def logprobs(
    logits: torch.Tensor, ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, ids.unsqueeze(1))
    rank = (logits > own).sum(-1) + 1
    top, top_ids = logits.topk(k, dim=-1)
    return (own - total).squeeze(1), rank, top_ids, top - total


def penalties(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    sequences: torch.Tensor,
    factors: torch.Tensor,
    longest: int,
) -> None:
    where, rows, prompts, lengths = sequences.unbind(1)
    own, text = logits[where], tokens[rows, :longest].long()
    vocab = logits.shape[1]
    repetition, frequency, presence = factors.unsqueeze(-1).unbind(1)  # [N, 1] each
    index = torch.arange(longest, device=tokens.device)
    # Positions that do not count go to a column of their own, cut off again.
    present = torch.where(index < lengths.unsqueeze(1), text, vocab)
    seen = torch.zeros(len(own), vocab + 1, dtype=torch.bool, device=logits.device)
    seen = seen.scatter_(1, present, True)[:, :vocab]
    output = torch.where(index >= prompts.unsqueeze(1), present, vocab)
    counts = torch.zeros(len(own), vocab + 1, device=logits.device)
    counts = counts.scatter_add_(1, output, torch.ones_like(output, dtype=counts.dtype))[:, :vocab]
    repeated = torch.where(own > 0, own / repetition, own * repetition)
    own = torch.where(seen, repeated, own)
    logits[where] = own - frequency * counts - presence * (counts > 0)


def token_bitmask(logits: torch.Tensor, where: torch.Tensor, allowed: torch.Tensor) -> None:
    bits = allowed.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=allowed.device) & 1
    bits = bits.flatten(1)[:, : logits.shape[1]]
    logits[where] = logits[where].masked_fill(bits == 0, float("-inf"))
