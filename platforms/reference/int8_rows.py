"""int8 rows of the KV cache: numbers, then their float32 scale. Contract: headrace.platforms.attention."""

from __future__ import annotations

import torch


def quantize(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] -> int8 [..., D + 4]."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    numbers = torch.nan_to_num(x / scale, nan=0.0, posinf=0.0, neginf=0.0).round().to(torch.int8)
    finite = scale.isfinite()
    scale = torch.where(finite, scale, torch.nan)
    numbers = torch.where(finite, numbers, torch.zeros_like(numbers))
    return torch.cat([numbers, scale.contiguous().view(torch.int8)], dim=-1)


def dequantize(rows: torch.Tensor) -> torch.Tensor:
    """int8 [..., D + 4] -> float32 [..., D]."""
    scale = rows[..., -4:].contiguous().view(torch.float32)
    return rows[..., :-4].float() * scale
