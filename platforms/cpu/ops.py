"""Norms, rotary embedding, activations and linear from PyTorch's CPU operators. Contracts: headrace.platforms.ops.

A decode step of a small model is bound by the number of operator calls, so each body makes as few as it can.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from headrace.platforms.linear import LinearImpl


class TorchLinear(LinearImpl):
    """oneDNN or MKL behind `linear`; weights stay as they are, [out, in]."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        dtype = getattr(torch, self.query.dtype)
        bias = None if bias is None else bias.to(dtype)
        return weight.to(dtype).contiguous(), bias

    def __call__(
        self, x: torch.Tensor, packed: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = F.linear(x, packed[0], packed[1])
        if out is not None:
            return out.copy_(y)
        return y.to(getattr(torch, self.query.out_dtype)) if self.query.out_dtype else y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    # The fused kernel wants one dtype: float32, in which the contract computes anyway.
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def rotary_embedding(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool,
) -> None:
    half = cos_sin.shape[1] // 2
    angles = cos_sin.index_select(0, positions).unsqueeze_(1)
    cos, sin = angles[..., :half], angles[..., half:]
    both = _joined(q, k)
    for x in (q, k) if both is None else (both,):
        if is_neox:
            first, second = x[..., :half], x[..., half : 2 * half]
        else:
            first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        a, b = first.float(), second.float()
        turned = (a * cos).addcmul_(b, sin, value=-1)
        second.copy_((b * cos).addcmul_(a, sin))
        first.copy_(turned)


def _joined(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """One view over q's and k's heads where k lies right behind q, as in a fused projection."""
    tokens, heads, width = q.shape
    if (
        q.stride() == k.stride()
        and q.stride(1) == width
        and k.data_ptr() - q.data_ptr() == heads * width * q.element_size()
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    ):
        return q.as_strided((tokens, heads + k.shape[1], width), q.stride())
    return None


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]).mul_(x[..., half:])


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return F.gelu(x[..., :half]).mul_(x[..., half:])


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return F.gelu(x[..., :half], approximate="tanh").mul_(x[..., half:])
