"""Layers of a model as one stream runs them: the ops in the order of engine/layers, over weights that are made up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.platforms.attention import Turn
from headrace.platforms.linear import Norm
from headrace.platforms.queries import (
    AttentionQuery,
    ExpertsQuery,
    LinearQuery,
    NormQuery,
    RouterQuery,
)
from headrace.platforms.reference.cases import Requests, make_batch, make_caches, scattered_blocks
from headrace.platforms.triton.attention import TritonAttention
from headrace.platforms.triton.experts import TritonExperts
from headrace.platforms.triton.linear import TritonLinear
from headrace.platforms.triton.norms import AddRmsNorm
from headrace.platforms.triton.routing import TopkSoftmax

DTYPE, KEYS, BLOCK = "bfloat16", 600, 32
LONGEST = 8192  # what the tables of a captured step have room for


@dataclass(frozen=True)
class Shape:
    hidden: int
    q_heads: int
    kv_heads: int
    intermediate: int
    experts: int = 0
    top_k: int = 0
    head: int = 128

    @property
    def qkv(self) -> tuple[int, int]:
        return self.hidden, (self.q_heads + 2 * self.kv_heads) * self.head

    @property
    def out(self) -> tuple[int, int]:
        return self.q_heads * self.head, self.hidden

    def products(self) -> list[tuple[int, int, bool]]:
        """(in, out, gated) of the linears."""
        if self.experts:
            return [(*self.qkv, False), (*self.out, False), (self.hidden, self.experts, False)]
        inner = self.intermediate
        wide = (self.hidden, 2 * inner, True), (inner, self.hidden, False)
        return [(*self.qkv, False), (*self.out, False), *wide]

    def bytes(self) -> int:
        """What a token reads of a layer."""
        weights = sum(width * out for width, out, _ in self.products())
        weights += self.top_k * 3 * self.hidden * self.intermediate
        return 2 * (weights + 2 * KEYS * self.kv_heads * self.head)


LAYERS = {"8B": Shape(4096, 32, 8, 14336), "30B": Shape(2048, 32, 4, 768, 128, 8)}


class Ops:
    def __init__(self, shape: Shape, runtime: Any) -> None:
        size = shape.head
        self.attention = TritonAttention(
            AttentionQuery(shape.q_heads, shape.kv_heads, size, size, DTYPE, DTYPE, size**-0.5),
            runtime,
        )
        self.norm = AddRmsNorm(NormQuery(shape.hidden, DTYPE), runtime)
        self.linears = [
            TritonLinear(LinearQuery(width, out, DTYPE, out_dtype=_router(shape, out)), runtime)
            for width, out, _ in shape.products()
        ]
        if shape.experts:
            sizes = (shape.experts, shape.top_k, shape.hidden, shape.intermediate)
            self.route = TopkSoftmax(RouterQuery(shape.experts, shape.top_k, True), runtime)
            self.experts = TritonExperts(ExpertsQuery(*sizes, DTYPE), runtime)

    def apart(self, q: Any, k: Any, v: Any, turn: Turn, caches: Any, plan: Any) -> torch.Tensor:
        q = self.attention.turn_and_write(q, k, v, turn, caches, plan)
        return self.attention.attend(q, *caches, plan)


def _router(shape: Shape, out: int) -> str:
    return "float32" if out == shape.experts else ""


def widen(batch: Any) -> None:
    """Block tables of the longest sequences, as graphs have them."""
    table = batch.block_tables[0]
    wide = table.new_zeros(len(table), LONGEST // BLOCK)
    wide[:, : table.shape[1]] = table
    batch.block_tables = [wide]


class Layers:
    """`count` of them, behind one another."""

    def __init__(self, shape: Shape, runtime: Any, count: int) -> None:
        self._shape, device = shape, runtime.device
        like = {"device": device, "dtype": getattr(torch, DTYPE)}
        requests = Requests(((KEYS, 1),))
        table = scattered_blocks(requests, BLOCK, 0)
        self._batch = make_batch(requests, table, BLOCK, device)
        widen(self._batch)
        attention = Ops(shape, runtime).attention
        self._layers = []
        for _ in range(count):
            caches = make_caches(attention, BLOCK, 1 + int(table.max()), device)
            for cache in caches:
                cache.normal_()
            weights: list[Any] = [
                (torch.randn(out, width, **like).mul_(width**-0.5), None)
                for width, out, _ in shape.products()
            ]
            if shape.experts:
                sizes = (shape.experts, 2 * shape.intermediate, shape.hidden)
                w13 = torch.randn(*sizes, **like).mul_(shape.hidden**-0.5)
                sizes = (shape.experts, shape.hidden, shape.intermediate)
                weights.append((w13, torch.randn(*sizes, **like).mul_(shape.intermediate**-0.5)))
            self._layers.append((caches, weights))
        self._norm = Norm(torch.ones(shape.hidden, device=device), 1e-5)
        ones, angles = torch.ones(shape.head, device=device), torch.randn(KEYS, shape.head)
        norms = (ones, ones) if shape.experts else None
        last = torch.full((1,), KEYS - 1, device=device)
        self._turn = Turn(last, angles.to(device), norms, 1e-5)
        self._x, self._residual = (torch.randn(1, shape.hidden, **like) for _ in range(2))

    def ops(self, runtime: Any) -> Ops:
        return Ops(self._shape, runtime)

    def run(self, ops: Ops, norms: str, turned: bool) -> torch.Tensor:
        """x after the layers, [1, hidden]. `norms` are part of the products behind them where these are "" = said to
        gain by it, "all" or "none"; `turned`: rotary embedding is part of attention."""
        shape, x, residual = self._shape, self._x, self._residual.clone()
        plan = ops.attention.plan(self._batch, 0)

        def normed(op: Any, packed: Any, activation: str = "", keep: bool = False) -> Any:
            nonlocal residual
            if norms == "all" or (op.normed_rows and norms != "none"):
                y, residual, kept = op.normed(x, residual, self._norm, packed, activation, keep)
                return y, kept
            kept, residual = ops.norm(x, residual, self._norm.weight, self._norm.eps)
            return op.gated(kept, packed, activation) if activation else op(kept, packed), kept

        heads = (shape.q_heads, shape.kv_heads, shape.kv_heads)
        for caches, weights in self._layers:
            qkv = normed(ops.linears[0], weights[0])[0].view(1, -1, shape.head)
            turn = ops.attention.turn_and_attend if turned else ops.apart
            attended = turn(*qkv.split(heads, dim=1), self._turn, caches, plan)
            x = ops.linears[1](attended.flatten(1), weights[1])
            if shape.experts:
                logits, kept = normed(ops.linears[2], weights[2], keep=True)
                x = ops.experts(kept, *ops.route(logits, shape.top_k, True), weights[3])
            else:
                inner, _ = normed(ops.linears[2], weights[2], "silu")
                x = ops.linears[3](inner, weights[3])
        return x
