"""Sampling that sorts only the head of the vocabulary. Contract: headrace.platforms.ops, "sample"."""

from __future__ import annotations

import torch

# Likeliest tokens looked at first, then second; rows that need more sort the whole vocabulary.
HEADS = (128, 2048)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    ids = logits.argmax(-1)
    rows = temperature.nonzero().squeeze(1)
    if not rows.numel():
        return ids
    scaled = logits[rows] / temperature[rows].unsqueeze(1)
    total = (scaled - scaled.amax(-1, keepdim=True)).exp().sum(-1, dtype=torch.float64)
    options = [top_k[rows], top_p[rows].double(), min_p[rows].double(), uniform[rows].double()]
    vocab = logits.shape[1]
    for head in (*(n for n in HEADS if n < vocab), vocab):
        chosen, known = _among(scaled, head, total, *options)
        ids[rows[known]] = chosen[known]
        left = ~known
        if not bool(left.any()):
            break
        rows, scaled, total = rows[left], scaled[left], total[left]
        options = [option[left] for option in options]
    return ids


def _among(
    scaled: torch.Tensor,
    head: int,
    total: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample from the `head` likeliest tokens: ids [R], and whether each is what the full order gives."""
    vocab = scaled.shape[1]
    if head == vocab:
        ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
        sure = torch.full(total.shape, vocab)
    else:
        ids = scaled.topk(head, dim=-1, sorted=False).indices.sort(dim=-1).values
        ordered, order = scaled.gather(1, ids).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order)
        # Of tokens as likely as the last one some may have been left out: only those above are certain.
        sure = (ordered > ordered[:, -1:]).sum(-1)
    mass = (ordered - ordered[:, :1]).exp().double()
    cumulative = mass.cumsum(-1)
    if head == vocab:
        total = cumulative[:, -1]

    def mass_of(prefix: torch.Tensor) -> torch.Tensor:
        return cumulative.gather(1, (prefix.clamp(1, head) - 1).unsqueeze(1)).squeeze(1)

    every = (top_k <= 0) | (top_k >= vocab)
    k = torch.where(every, vocab, top_k).long()
    left = torch.where(every, total, mass_of(k))
    short = (cumulative < (top_p * left).unsqueeze(1)).sum(-1) + 1
    likely = (mass >= min_p.unsqueeze(1)).sum(-1)
    kept = torch.minimum(k, torch.where(top_p < 1, short, vocab))
    kept = torch.minimum(kept, torch.where(min_p > 0, likely, vocab)).clamp(min=1)
    # The kept prefix ends inside what is certain, and the mass that top_p refers to is certain too.
    ends = (kept <= sure) & ((top_p >= 1) | every | (k <= sure))
    goal = uniform * torch.where(ends, mass_of(kept), total)
    index = torch.searchsorted(cumulative, goal.unsqueeze(1), right=True).squeeze(1)
    index = torch.minimum(index, kept - 1).clamp(max=head - 1)
    known = ends | ((kept == vocab) & (index < sure))
    return ids.gather(1, index.unsqueeze(1)).squeeze(1), known
