"""RMS norm, alone and behind the residual addition, and gated activations. Contracts: headrace.platforms.ops."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import ActivationQuery, NormQuery
from headrace.platforms.rocm.aiter import vendor


class _Norm:
    name: ClassVar[str]

    def __init__(self, query: NormQuery, runtime: DeviceRuntime) -> None:
        self._call = vendor.find(self.name)
        self._dtype = getattr(torch, query.dtype)
        self._rounded: Any = WeakTensorKeyDictionary()

    def _weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Of the activations' dtype, which is all that AITER reads; made once for each weight."""
        if weight.dtype == self._dtype:
            return weight
        found: torch.Tensor | None = self._rounded.get(weight)
        if found is None:
            found = weight.to(self._dtype)
            # what is made inside a capture belongs to its graph and holds nothing until that is replayed
            if not (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._rounded[weight] = found
        return found


class RmsNorm(_Norm):
    name = "rms_norm"

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if not rows.shape[0]:
            return torch.empty_like(x)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        normed: torch.Tensor = self._call(rows, self._weight(weight), eps)
        return normed.reshape(x.shape)


class AddRmsNorm(_Norm):
    name = "add_rms_norm"

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        if x.shape[0]:
            self._call(out, x, residual, total, self._weight(weight), eps)
        return out, total


class _Gated:
    name: ClassVar[str]

    def __init__(self, query: ActivationQuery, runtime: DeviceRuntime) -> None:
        self._call = vendor.find(self.name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
        if x.shape[0]:
            self._call(out, x.contiguous())
        return out


class SiluAndMul(_Gated):
    name = "silu_and_mul"


class GeluAndMul(_Gated):
    name = "gelu_and_mul"


class GeluTanhAndMul(_Gated):
    name = "gelu_tanh_and_mul"
