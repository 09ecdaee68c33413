"""Sampling that sorts only the head of the vocabulary. Contract: headrace.platforms.ops, "sample".

Most rows are settled by the HEAD likeliest tokens. The others (flat distributions, as a high temperature makes them)
are settled one by one over a histogram: only the one bin in which a sum is reached is sorted.
"""

from __future__ import annotations

import torch

HEAD = 128
# Bins of equal width below the largest logit; the last one takes what is e**-32 times as likely, and less.
BINS, BINS_PER_UNIT = 4096, 128


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
    chosen, known = _among(scaled, min(HEAD, logits.shape[1]), total, *options)
    for row in (~known).nonzero().squeeze(1).tolist():
        k, p, least, number = (option[row].item() for option in options)
        chosen[row] = _Sorted(scaled[row]).sample(int(k), p, least, number)
    ids[rows] = chosen
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


class _Sorted:
    """One row in the contract's order, sorted a bin at a time."""

    def __init__(self, scaled: torch.Tensor) -> None:
        self.scaled = scaled
        self.vocab = scaled.shape[0]
        depth = scaled.max() - scaled
        self.finite = not bool(depth.isnan().any())
        if self.finite:
            self.mass = depth.neg().exp_().double()
            self.bins = depth.mul_(BINS_PER_UNIT).clamp_(max=BINS - 1).long()
            self.counts = torch.bincount(self.bins, minlength=BINS).cumsum(0)
            self.masses = torch.bincount(self.bins, self.mass, minlength=BINS).cumsum(0)

    def sample(self, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
        if not self.finite:
            return 0
        kept = top_k if 0 < top_k < self.vocab else self.vocab
        if top_p < 1:
            kept = min(kept, self._reach(top_p * self._mass_of(kept), beyond=False)[0] + 1)
        if min_p > 0:
            kept = min(kept, max(1, int((self.mass >= min_p).sum())))
        position, token = self._reach(uniform * self._mass_of(kept), beyond=True)
        # by rounding alone the sum may be reached one token late
        return token if position < kept else self._token_at(kept - 1)

    def _bin(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Tokens before a bin, its own ids in order, and the cumulative mass at each of them."""
        ids = (self.bins == index).nonzero().squeeze(1)
        ids = ids[self.scaled[ids].sort(descending=True, stable=True).indices]
        before = int(self.counts[index - 1]) if index else 0
        mass = self.masses[index - 1] if index else 0.0
        return before, ids, self.mass[ids].cumsum(0) + mass

    def _reach(self, goal: float, beyond: bool) -> tuple[int, int]:
        """Position and id of the first token whose cumulative mass is at least `goal`, or beyond it."""
        index = int(torch.searchsorted(self.masses, goal, right=beyond))
        before, ids, cumulative = self._bin(min(index, int(self.bins.max())))
        inside = min(int(torch.searchsorted(cumulative, goal, right=beyond)), len(ids) - 1)
        return before + inside, int(ids[inside])

    def _mass_of(self, prefix: int) -> float:
        if prefix == self.vocab:
            return self.masses[-1].item()
        before, _, cumulative = self._bin(int(torch.searchsorted(self.counts, prefix)))
        return cumulative[prefix - before - 1].item()

    def _token_at(self, position: int) -> int:
        index = int(torch.searchsorted(self.counts, position, right=True))
        before, ids, _ = self._bin(index)
        return int(ids[position - before])
