"""Sampling without sorting. Contract: headrace.platforms.ops, "sample".

Rows are divided into tiles, so that one row fills a device as many do. Passes over the logits: one for the largest,
which is all that greedy rows need; one for the number and mass above each of some edges; one, over tiles that hold any
of them, that lists the tokens between the two edges where the first filter, or else the draw, ends (those above as
well, if so few fit). So three at most for a row whose filters and draw end within the list. Each that does not takes
one more by a single program, and, where more tokens than a list holds lie between two edges, one for each time that
an eighth of what is there is taken. What is launched does not depend on the options, and nothing is read back.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import SampleQuery
from headrace.platforms.triton.launch import Launcher, launch_options, power_of_two
from headrace.platforms.triton.sampling_kernels import (
    draw_kernel,
    greedy_kernel,
    list_kernel,
    masses_kernel,
    peaks_kernel,
)

BLOCK = 4096  # of a tile
EDGES = 8  # as in the kernels
SIZE = 16384  # of a list, at most
# name -> kernel, launch options
KERNELS: dict[str, tuple[Any, dict[str, int]]] = {
    "peaks": (peaks_kernel, {"num_warps": 8}),
    "masses": (masses_kernel, {"num_warps": 8}),
    "list": (list_kernel, {"num_warps": 8}),
    "greedy": (greedy_kernel, {"num_warps": 1}),
    "draw": (draw_kernel, {"PART": 512, "CHUNK": 2048, "num_warps": 16}),
}


def list_size(query: SampleQuery) -> int:
    return min(SIZE, power_of_two(query.vocab))


def options(name: str, query: SampleQuery, runtime: Any) -> dict[str, Any]:
    """Launch options of one of KERNELS."""
    tiles = triton.cdiv(query.vocab, BLOCK)
    chosen = launch_options(f"sample_{name}", query, runtime, KERNELS[name][1], dependent=True)
    return {**chosen, "BLOCK": BLOCK, "SIZE": list_size(query), "TILES": power_of_two(tiles)}


class Sample:
    """Nothing is read back: every row's filters are decided on the device."""

    fast_greedy = True

    def __init__(self, query: SampleQuery, runtime: DeviceRuntime) -> None:
        self._size = list_size(query)
        chosen = {name: options(name, query, runtime) for name in KERNELS}
        self._peaks, self._masses, self._list, self._greedy = (
            Launcher(KERNELS[name][0], chosen[name])
            for name in ("peaks", "masses", "list", "greedy")
        )
        self._draw, self._draw_guarded = (
            Launcher(draw_kernel, {**chosen["draw"], "GUARD": guard}) for guard in (False, True)
        )

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        return self._sample(ids, logits, temperature, top_k, top_p, min_p, uniform, False)

    def guarded(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
        greedy: bool,
    ) -> torch.Tensor:
        ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        if not greedy:
            return self._sample(ids, logits, temperature, top_k, top_p, min_p, uniform, True)
        if len(logits):
            logits, best, _, finite, _ = self._largest(logits)
            sizes = (logits.shape[1], best.shape[1])
            self._greedy((len(logits), 1, 1), best, finite, ids, *sizes)
        return ids

    def _largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The logits with neighbours side by side; of each tile the largest, the sum and how many are finite; zeros."""
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        rows, vocab = logits.shape
        shape, device = (rows, triton.cdiv(vocab, BLOCK)), logits.device
        best = torch.empty(shape, dtype=torch.int64, device=device)
        totals = torch.empty(shape, dtype=torch.float32, device=device)
        finite = torch.empty(shape, dtype=torch.int32, device=device)
        sums = torch.empty((rows, 2 * EDGES), dtype=torch.int64, device=device)
        sizes = (logits.stride(0), vocab, shape[1])
        self._peaks((shape[1], rows, 1), logits, best, totals, finite, sums, *sizes)
        return logits, best, totals, finite, sums

    def _sample(
        self,
        ids: torch.Tensor,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
        guard: bool,
    ) -> torch.Tensor:
        if not len(logits):
            return ids
        logits, best, totals, finite, sums = self._largest(logits)
        (rows, tiles), device = best.shape, logits.device
        edges = torch.empty((rows, EDGES), dtype=torch.float32, device=device)
        counts = torch.empty((rows, EDGES, tiles), dtype=torch.int32, device=device)
        values = torch.empty((rows, self._size), dtype=torch.float32, device=device)
        tokens = torch.empty((rows, self._size), dtype=torch.int32, device=device)
        sizes = (logits.stride(0), logits.shape[1], tiles)
        facts = (best, totals, finite, sums, edges, counts)
        self._masses((tiles, rows, 1), logits, temperature, *facts, *sizes)
        asked = (logits, temperature, top_k, top_p, min_p, uniform)
        self._list((tiles, rows, 1), *asked, best, sums, edges, counts, values, tokens, *sizes)
        launch = self._draw_guarded if guard else self._draw
        launch((rows, 1, 1), *asked, best, finite, sums, edges, values, tokens, ids, *sizes)
        return ids
