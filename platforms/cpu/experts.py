"""Mixture of experts on the CPU: tokens are sorted by expert, each expert that is used computes its rows at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from headrace.platforms.cpu import kernels as native
from headrace.platforms.cpu import native_ops
from headrace.platforms.cpu.kernels import DTYPES, FORMATS, Kernels
from headrace.platforms.cpu.native_ops import NativeLinear, Panels
from headrace.platforms.linear import ExpertsImpl
from headrace.platforms.queries import ExpertsQuery, LinearQuery, RouterQuery
from headrace.platforms.reference.experts import GATED

_ROUTE, _EXPERTS = native.OPS.index("route"), native.OPS.index("experts")
TOKENS = 256  # in one native call
MANY_ROWS = 16  # rows for each expert from which the tile unit pays
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


@dataclass(slots=True)
class ExpertPanels:
    """Packed matrices of each expert (gate and up, down), and where they lie."""

    experts: list[tuple[Panels, Panels]]
    w13: np.ndarray = field(init=False)  # int64 [E]: addresses
    w2: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        gate_up, down = zip(*self.experts, strict=True)
        self.w13, self.w2 = (
            np.array([panels.data.data_ptr() for panels in side], np.int64)
            for side in (gate_up, down)
        )


class NativeExperts(_SortedExperts):
    """Each expert's matrices as panels of the native library, quantized blocks included.

    One native call, so a decode step with experts can be captured. On the tile unit, prompts with many rows for each
    expert are faster expert by expert.
    """

    def __init__(self, query: ExpertsQuery, runtime: Any) -> None:
        super().__init__(query, runtime)
        self._kernels: Kernels = runtime.kernels()
        hidden, size, dtype = query.hidden, query.intermediate, query.dtype
        self._gate_up = NativeLinear(LinearQuery(hidden, 2 * size, dtype, query.scheme), runtime)
        down = LinearQuery(size, hidden, dtype, query.down_scheme, out_dtype="float32")
        self._down = NativeLinear(down, runtime)
        self._activation = _NATIVE[query.activation](query, runtime)

    def pack(self, w13: Any, w2: Any) -> ExpertPanels:
        return ExpertPanels(
            [
                (self._gate_up.pack(w13[expert], None), self._down.pack(w2[expert], None))
                for expert in range(self.query.experts)
            ]
        )

    def pack_named(self, name: str, w13: Callable[[], Any], w2: Callable[[], Any]) -> ExpertPanels:
        gate_up, down = cache(w13), cache(w2)  # read when the first expert is missing

        def one(expert: int) -> tuple[Panels, Panels]:
            return (
                self._gate_up.pack_named(f"{name} w13 {expert}", lambda: gate_up()[expert], None),
                self._down.pack_named(f"{name} w2 {expert}", lambda: down()[expert], None),
            )

        return ExpertPanels([one(expert) for expert in range(self.query.experts)])

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: ExpertPanels
    ) -> torch.Tensor:
        kernels, tokens = self._kernels, x.shape[0]
        if kernels.tape is not None:
            return self._run(x, weights, ids, packed)
        if kernels.isa == "amx" and ids.numel() >= MANY_ROWS * self.query.experts:
            return super().__call__(x, weights, ids, packed)
        out = kernels.empty((tokens, x.shape[1]), x.dtype)
        for start in range(0, tokens, TOKENS):  # bounds the memory between the products
            part = slice(start, start + TOKENS)
            self._run(x[part], weights[part], ids[part], packed, out[part])
        return out

    def _run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        packed: ExpertPanels,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kernels, query = self._kernels, self.query
        if out is None:
            out = kernels.empty(tuple(x.shape), x.dtype)
        if kernels.tape is None:
            weights, ids = weights.contiguous(), ids.contiguous()
        gate_up, down = (
            FORMATS[op.query.scheme or query.dtype] for op in (self._gate_up, self._down)
        )
        args = native.Experts(
            x.data_ptr(), weights.data_ptr(), ids.data_ptr(), packed.w13.ctypes.data, packed.w2.ctypes.data,
            out.data_ptr(), 0, x.stride(0), out.stride(0), x.shape[0], ids.shape[1], query.experts, query.hidden,
            query.intermediate, gate_up, down, self._activation.act, DTYPES[x.dtype],
        )  # fmt: skip
        size = kernels.library.hr_experts_scratch(native.byref(args))
        scratch = kernels.empty((max(size, 64),), torch.uint8)
        args.scratch = scratch.data_ptr()
        kernels.run(_EXPERTS, args)
        return out

    def expert(self, x: torch.Tensor, packed: ExpertPanels, expert: int) -> torch.Tensor:
        gate_up, down = packed.experts[expert]
        return self._down(self._activation(self._gate_up(x, gate_up)), down)


class NativeRouter:
    """topk_softmax(logits, top_k, renormalize)"""

    def __init__(self, query: RouterQuery, runtime: Any) -> None:
        self._kernels: Kernels = runtime.kernels()

    def __call__(
        self, logits: torch.Tensor, top_k: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kernels, (rows, experts) = self._kernels, logits.shape
        weights = kernels.empty((rows, top_k), torch.float32)
        ids = kernels.empty((rows, top_k), torch.int32)
        kernels.run(
            _ROUTE,
            native.Route(
                logits.data_ptr(), weights.data_ptr(), ids.data_ptr(), logits.stride(0),
                rows, experts, top_k, int(renormalize),
            ),
        )  # fmt: skip
        return weights, ids
