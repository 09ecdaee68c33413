"""Collectives by HCCL. Contract: headrace.platforms.collectives."""

from __future__ import annotations

import torch

from headrace.platforms.torch_device.collectives import TorchCollectives

# What HCCL adds up; other dtypes go through the nearest of them.
_SUMMED = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64)


class HcclCollectives(TorchCollectives):
    backend = "hccl"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype in _SUMMED:
            return super().all_reduce(x)
        return super().all_reduce(x.float()).to(x.dtype)
