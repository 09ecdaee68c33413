"""Norms, rotary embedding, gated activations, linear layers, embeddings and sampling on the native kernels.

Every call fills one C struct and makes one native call; during a capture the call is recorded instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headrace.platforms.cpu import kernels as native
from headrace.platforms.cpu.kernels import DTYPES, FORMATS, Kernels
from headrace.platforms.linear import EmbeddingImpl, LinearImpl
from headrace.platforms.queries import EmbeddingQuery, LinearQuery

_OP = {name: code for code, name in enumerate(native.OPS)}
_RMS_NORM, _LINEAR, _ROTARY = _OP["rms_norm"], _OP["linear"], _OP["rotary"]
_GLU, _EMBEDDING, _SAMPLE = _OP["glu"], _OP["embedding"], _OP["sample"]
_LOGPROBS = _OP["logprobs"]


class NativeNorm:
    """rms_norm(x[..., H], weight[H], eps): rows may be strided, heads within a row may not."""

    def __init__(self, query: Any, runtime: Any) -> None:
        self._kernels: Kernels = runtime.kernels()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        kernels, hidden = self._kernels, x.shape[-1]
        if x.dim() > 3 or x.stride(-1) != 1 or (x.dim() == 3 and x.stride(1) != hidden):
            x = x.contiguous().view(-1, hidden)
        rows = x.shape[0]
        inner = x.shape[1] if x.dim() == 3 else 1
        y = kernels.empty(tuple(x.shape), x.dtype)
        weight = _float(weight)
        kernels.run(
            _RMS_NORM,
            native.RmsNorm(
                x.data_ptr(), None, weight.data_ptr(), y.data_ptr(),
                x.stride(0), 0, inner * hidden, rows, inner, hidden, DTYPES[x.dtype], eps,
            ),
        )  # fmt: skip
        return y


class NativeAddNorm:
    """fused_add_rms_norm(x, residual, weight, eps): the sum is written into `residual`."""

    def __init__(self, query: Any, runtime: Any) -> None:
        self._kernels: Kernels = runtime.kernels()

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kernels = self._kernels
        rows, hidden = x.shape
        y = kernels.empty((rows, hidden), x.dtype)
        weight = _float(weight)
        kernels.run(
            _RMS_NORM,
            native.RmsNorm(
                x.data_ptr(), residual.data_ptr(), weight.data_ptr(), y.data_ptr(),
                x.stride(0), residual.stride(0), hidden, rows, 1, hidden, DTYPES[x.dtype], eps,
            ),
        )  # fmt: skip
        return y, residual


def _float(weight: torch.Tensor) -> torch.Tensor:
    # the engine keeps norm weights in float32; other callers of the contract may not
    return weight if weight.dtype == torch.float32 else weight.float()


class NativeRotary:
    def __init__(self, query: Any, runtime: Any) -> None:
        self._kernels: Kernels = runtime.kernels()

    def __call__(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        is_neox: bool,
    ) -> None:
        size = q.shape[2]
        self._kernels.run(
            _ROTARY,
            native.Rotary(
                q.data_ptr(), k.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), None, None,
                q.stride(0), k.stride(0), q.shape[0], q.shape[1], k.shape[1], size,
                cos_sin.shape[1], int(is_neox), DTYPES[q.dtype], 0.0,
            ),
        )  # fmt: skip


class _NativeGlu:
    act: int

    def __init__(self, query: Any, runtime: Any) -> None:
        self._kernels: Kernels = runtime.kernels()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        kernels, rows, n = self._kernels, x.shape[0], x.shape[1] // 2
        y = kernels.empty((rows, n), x.dtype)
        args = native.Glu(
            x.data_ptr(), y.data_ptr(), x.stride(0), n, rows, n, self.act, DTYPES[x.dtype]
        )
        kernels.run(_GLU, args)
        return y


class NativeSiluAndMul(_NativeGlu):
    act = 0


class NativeGeluTanhAndMul(_NativeGlu):
    act = 1


class NativeGeluAndMul(_NativeGlu):
    act = 2


@dataclass(slots=True)
class Panels:
    """A packed matrix: panels of 16 rows (native/quant.h), and the bias in float32."""

    data: torch.Tensor  # uint8
    scheme: str
    rows: int
    k: int
    bias: torch.Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def stored_rows(weight: Any, scheme: str) -> np.ndarray:
    """The weight's bytes, [rows, bytes a row]: a tensor, or raw quantized rows as they lie in a file."""
    if isinstance(weight, np.ndarray):
        return weight
    weight = weight.contiguous()
    return weight.view(torch.uint8).numpy().reshape(weight.shape[0], -1)


class NativeLinear(LinearImpl):
    packing = "panels"

    def __init__(self, query: LinearQuery, runtime: Any) -> None:
        super().__init__(query, runtime)
        self._kernels: Kernels = runtime.kernels()
        self._scheme = query.scheme or query.dtype
        self._format = FORMATS[self._scheme]
        self._out = getattr(torch, query.out_dtype or query.dtype)

    def pack(self, weight: Any, bias: torch.Tensor | None) -> Panels:
        rows, k = self.query.out_features, self.query.in_features
        data = self._kernels.pack(self._scheme, stored_rows(weight, self._scheme), rows, k)
        return Panels(data, self._scheme, rows, k, None if bias is None else bias.float())

    def pack_named(self, name: str, weight: Callable[[], Any], bias: torch.Tensor | None) -> Panels:
        rows, k, scheme = self.query.out_features, self.query.in_features, self._scheme
        data = self._kernels.kept(name, scheme, rows, k, lambda: stored_rows(weight(), scheme))
        return Panels(data, scheme, rows, k, None if bias is None else bias.float())

    def empty(self, rows: int, features: int) -> torch.Tensor:
        return self._kernels.empty((rows, features), self._out)

    def __call__(
        self, x: torch.Tensor, packed: Panels, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        kernels, rows = self._kernels, x.shape[0]
        n, k = packed.rows, packed.k
        if out is None:
            out = kernels.empty((rows, n), self._out)
        # Steps that read prompts are not captured (with --enforce-eager none is, and all count as such). The head runs
        # for sampled rows only, in decode steps too.
        prompt = int(kernels.tape is None and not self.query.out_dtype)
        scratch = 0
        if rows > 4:
            size = kernels.library.hr_linear_scratch(self._format, rows, k)
            scratch = kernels.scratch("linear", size)
        bias = packed.bias.data_ptr() if packed.bias is not None else None
        kernels.run(
            _LINEAR,
            native.Linear(
                x.data_ptr(), packed.data.data_ptr(), bias, out.data_ptr(), scratch,
                x.stride(0), out.stride(0), rows, k, n, self._format,
                DTYPES[x.dtype], DTYPES[out.dtype], 0.0, prompt,
            ),
        )  # fmt: skip
        return out


class NativeEmbedding(EmbeddingImpl):
    packing = "panels"

    def __init__(self, query: EmbeddingQuery, runtime: Any) -> None:
        super().__init__(query, runtime)
        self._kernels: Kernels = runtime.kernels()
        self._scheme = query.scheme or query.dtype
        self._format = FORMATS[self._scheme]
        self._dtype = getattr(torch, query.dtype)

    def pack(self, weight: Any) -> Panels:
        rows, k = self.query.vocab, self.query.hidden
        data = self._kernels.pack(self._scheme, stored_rows(weight, self._scheme), rows, k)
        return Panels(data, self._scheme, rows, k)

    def pack_named(self, name: str, weight: Callable[[], Any]) -> Panels:
        rows, k, scheme = self.query.vocab, self.query.hidden, self._scheme
        data = self._kernels.kept(name, scheme, rows, k, lambda: stored_rows(weight(), scheme))
        return Panels(data, scheme, rows, k)

    def __call__(self, ids: torch.Tensor, packed: Panels) -> torch.Tensor:
        kernels = self._kernels
        if ids.dtype != torch.int32:
            ids = ids.int()
        y = kernels.empty((ids.shape[0], packed.k), self._dtype)
        kernels.run(
            _EMBEDDING,
            native.Embedding(
                ids.data_ptr(), packed.data.data_ptr(), y.data_ptr(), packed.k, ids.shape[0],
                packed.k, packed.rows, self._format, DTYPES[self._dtype], self.query.scale,
            ),
        )  # fmt: skip
        return y


class NativeSample:
    """Top-k, top-p and min-p by buckets of the logits: only what a filter ends in is sorted."""

    fast_greedy = True

    def __init__(self, query: Any, runtime: Any) -> None:
        self._kernels: Kernels = runtime.kernels()

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        return self._run(logits, (temperature, top_k, top_p, min_p, uniform), torch.int64)

    def guarded(self, logits: torch.Tensor, *options: Any) -> torch.Tensor:
        """The five options, and whether all rows are greedy, which each says itself here."""
        return self._run(logits, options[:-1], torch.int32)

    def _run(
        self, logits: torch.Tensor, options: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        rows, n = logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        options = [option.contiguous() for option in options]
        ids = self._kernels.empty((rows,), dtype)
        self._kernels.run(
            _SAMPLE,
            native.Sample(
                logits.data_ptr(), *(option.data_ptr() for option in options), ids.data_ptr(),
                logits.stride(0), rows, n, dtype == torch.int32,
            ),
        )  # fmt: skip
        return ids


class NativeLogprobs:
    """logprobs(logits, ids, k): one pass each for the sum, the rank and the largest."""

    def __init__(self, query: Any, runtime: Any) -> None:
        self._kernels: Kernels = runtime.kernels()

    def __call__(
        self, logits: torch.Tensor, ids: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        kernels, (rows, n) = self._kernels, logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        ids = ids.contiguous()
        own, rank = kernels.empty((rows,), torch.float32), kernels.empty((rows,), torch.int64)
        top, top_ids = (
            kernels.empty((rows, k), torch.float32),
            kernels.empty((rows, k), torch.int64),
        )
        kernels.run(
            _LOGPROBS,
            native.Logprobs(
                logits.data_ptr(), ids.data_ptr(), own.data_ptr(), rank.data_ptr(), top.data_ptr(),
                top_ids.data_ptr(), logits.stride(0), rows, n, k,
            ),
        )  # fmt: skip
        return own, rank, top_ids, top
