"""Mixture of experts on the CPU: tokens are sorted by expert, each expert that is used computes its rows at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from headrace.platforms.cpu import native_ops
from headrace.platforms.cpu.native_ops import NativeLinear, Panels
from headrace.platforms.linear import ExpertsImpl
from headrace.platforms.queries import ExpertsQuery, LinearQuery
from headrace.platforms.reference.experts import GATED

_NATIVE = {
    "silu": native_ops.NativeSiluAndMul,
    "gelu_tanh": native_ops.NativeGeluTanhAndMul,
    "gelu": native_ops.NativeGeluAndMul,
}


class _SortedExperts(ExpertsImpl):
    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Any
    ) -> torch.Tensor:
        tokens, top_k = ids.shape
        out = torch.zeros(tokens, x.shape[1])
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        scale = weights.reshape(-1, 1).index_select(0, order)
        rows = order.div_(top_k, rounding_mode="floor")
        start = 0
        for expert, count in enumerate(flat.bincount(minlength=self.query.experts).tolist()):
            if count:
                stop = start + count
                mine = rows[start:stop]
                picked = x if tokens == 1 else x.index_select(0, mine)
                y = self.expert(picked, packed, expert).mul_(scale[start:stop])
                out.index_add_(0, mine, y)
                start = stop
        return out.to(x.dtype)

    @abstractmethod
    def expert(self, x: torch.Tensor, packed: Any, expert: int) -> torch.Tensor:
        """One expert on its tokens: x [rows, H] -> new float32 [rows, H]."""


class TorchExperts(_SortedExperts):
    """oneDNN or MKL; weights stay as they are."""

    def __init__(self, query: ExpertsQuery, runtime: Any) -> None:
        super().__init__(query, runtime)
        self._activation = GATED[query.activation]  # in float32, rounded once

    def pack(self, w13: torch.Tensor, w2: torch.Tensor) -> Any:
        dtype = getattr(torch, self.query.dtype)
        return w13.to(dtype).contiguous(), w2.to(dtype).contiguous()

    def expert(self, x: torch.Tensor, packed: Any, expert: int) -> torch.Tensor:
        w13, w2 = packed
        return F.linear(self._activation(F.linear(x, w13[expert])), w2[expert]).float()


class NativeExperts(_SortedExperts):
    """Each expert's matrices as panels of the native library, quantized blocks included."""

    def __init__(self, query: ExpertsQuery, runtime: Any) -> None:
        super().__init__(query, runtime)
        hidden, size, dtype = query.hidden, query.intermediate, query.dtype
        self._gate_up = NativeLinear(LinearQuery(hidden, 2 * size, dtype, query.scheme), runtime)
        down = LinearQuery(size, hidden, dtype, query.down_scheme, out_dtype="float32")
        self._down = NativeLinear(down, runtime)
        self._activation = _NATIVE[query.activation](query, runtime)

    def pack(self, w13: Any, w2: Any) -> list[tuple[Panels, Panels]]:
        return [
            (self._gate_up.pack(w13[expert], None), self._down.pack(w2[expert], None))
            for expert in range(self.query.experts)
        ]

    def pack_named(
        self, name: str, w13: Callable[[], Any], w2: Callable[[], Any]
    ) -> list[tuple[Panels, Panels]]:
        gate_up, down = cache(w13), cache(w2)  # read when the first expert is missing

        def one(expert: int) -> tuple[Panels, Panels]:
            return (
                self._gate_up.pack_named(f"{name} w13 {expert}", lambda: gate_up()[expert], None),
                self._down.pack_named(f"{name} w2 {expert}", lambda: down()[expert], None),
            )

        return [one(expert) for expert in range(self.query.experts)]

    def expert(self, x: torch.Tensor, packed: Any, expert: int) -> torch.Tensor:
        gate_up, down = packed[expert]
        return self._down(self._activation(self._gate_up(x, gate_up)), down)
