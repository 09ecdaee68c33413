"""Norms, rotary embedding and gated activations. Contracts: headrace.platforms.ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def rotary_embedding(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool,
) -> None:
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[positions].unsqueeze(1).split(half, dim=-1)  # [T, 1, R/2] each
    for x in (q, k):
        if is_neox:
            first, second = x[..., :half], x[..., half : 2 * half]
        else:
            first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        a, b = (
            first.float(),
            second.float(),
        )  # float32 inputs: views, so both results come before either write
        turned = a * cos - b * sin, b * cos + a * sin
        first.copy_(turned[0])
        second.copy_(turned[1])


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate) * up).to(x.dtype)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)
