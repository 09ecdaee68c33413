"""Run the sampling kernels in Triton's interpreter beside the reference; a line for each difference, exit code 1.

TRITON_INTERPRET=1 python -m tests.platforms.triton.interpreted_sampling
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.queries import SampleQuery
from headrace.platforms.reference.sampling import sample as reference
from headrace.platforms.triton import sampling

ROWS = 6


def options(vocab: int, choose: Any, draws: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Of each row one of the values that filters begin, end or change at."""

    def column(*values: float) -> torch.Tensor:
        return torch.tensor([choose(values) for _ in range(ROWS)])

    return (
        column(0.0, 0.3, 1.0, 2.0, 10.0),
        column(0, 0, 1, 50, 65, vocab - 1, vocab, 10**9).int(),
        column(1.0, 0.99, 0.9, 0.5, 1e-6, 0.0),
        column(0.0, 0.0, 0.01, 0.5, 1.0),
        torch.rand(ROWS, generator=draws),
    )


def logits_of(vocab: int, scale: float, draws: torch.Generator) -> torch.Tensor:
    """Plain rows, one with ties, one with masked tokens."""
    logits = torch.randn(ROWS, vocab, generator=draws) * scale
    logits[2] = (logits[2] * 4).round() / 4
    logits[4, vocab // 2 :] = float("-inf")
    return logits


def differences(vocab: int, scale: float, op: Any, choose: Any) -> Iterator[str]:
    draws = torch.Generator().manual_seed(vocab)
    logits = logits_of(vocab, scale, draws)
    asked = options(vocab, choose, draws)
    want = reference(logits, *asked)
    label = f"vocabulary {vocab}, logits x{scale}, {[one.tolist() for one in asked]}"
    if not torch.equal(op(logits, *asked), want):
        yield f"{label}: {op(logits, *asked).tolist()} for {want.tolist()}"
    logits[1, vocab // 3], logits[3], logits[5, 0] = torch.nan, torch.inf, -torch.inf
    finite = logits.isfinite().all(-1)
    for greedy in (False, True):
        chosen = reference(logits, torch.zeros(ROWS), *asked[1:]) if greedy else want
        chosen = torch.where(finite, chosen, -1).int()
        got = op.guarded(logits, *asked, greedy)
        if got.dtype != torch.int32 or not torch.equal(got, chosen):
            yield f"{label}, guarded, greedy {greedy}: {got.tolist()} for {chosen.tolist()}"
    some = op(logits, *asked)
    if not torch.equal(some[finite], want[finite]) or not ((some >= 0) & (some < vocab)).all():
        yield f"{label}: {some.tolist()} where some logits are not finite"


def main() -> int:
    torch.set_num_threads(1)
    # tiles and lists so small that rows have many of them and edges are drawn anew
    sampling.BLOCK, sampling.SIZE = 256, 64
    sampling.KERNELS["draw"][1].update(PART=64, CHUNK=256)
    platform = CpuPlatform()
    runtime = platform.open(platform.probe()[0])
    choose, wrong = random.Random(0).choice, 0
    for vocab, scale in ((2, 0.3), (700, 0.0), (700, 0.3), (700, 4.0)):
        op = sampling.Sample(SampleQuery(vocab, ROWS), runtime)
        for text in differences(vocab, scale, op, choose):
            wrong += 1
            print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
