"""Two kernels. What each op must do is written in headrace.platforms.ops and headrace.platforms.linear."""

from __future__ import annotations

from typing import Any

import torch

from headrace.platforms.linear import LinearImpl


class ExampleLinear(LinearImpl):
    """A matrix is turned once, when it is loaded: packing is where your kernel's own layout comes from."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        dtype = getattr(torch, self.query.dtype)
        turned = weight.to(dtype).t().contiguous()  # [in, out]
        return turned, None if bias is None else bias.to(dtype)

    def __call__(
        self, x: torch.Tensor, packed: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        turned, bias = packed
        y = torch.mm(x, turned) if bias is None else torch.addmm(bias, x, turned)
        if out is not None:
            return out.copy_(y)
        return y.to(getattr(torch, self.query.out_dtype)) if self.query.out_dtype else y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In float32, rounded once: the contract's tolerance has no room for more."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale * weight.float()).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both inputs are given up, so the sum may be written into one of them."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual
