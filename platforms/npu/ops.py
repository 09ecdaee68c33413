"""Norms, rotary embedding and gated activations by torch_npu's ops. Contracts: headrace.platforms.ops.

Sources: torch_npu's documentation of npu_rms_norm, npu_add_rms_norm, npu_rotary_mul, npu_apply_rotary_pos_emb,
npu_swiglu and npu_geglu.
"""

from __future__ import annotations

import torch

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import ActivationQuery, NormQuery, RotaryQuery


class RmsNorm:
    def __init__(self, query: NormQuery, runtime: DeviceRuntime) -> None:
        pass

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        # the op wants both of one dtype; it computes in float32
        normed: torch.Tensor = torch.ops.npu.npu_rms_norm(x.contiguous(), weight.to(x.dtype), eps)[
            0
        ]
        return normed


class AddRmsNorm:
    def __init__(self, query: NormQuery, runtime: DeviceRuntime) -> None:
        pass

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, _, total = torch.ops.npu.npu_add_rms_norm(
            x.contiguous(), residual.contiguous(), weight.to(x.dtype), eps
        )
        return normed, total


class RotaryMul:
    """Any rotary dimension, halves or neighbours: one call for q and one for k."""

    def __init__(self, query: RotaryQuery, runtime: DeviceRuntime) -> None:
        pass

    def __call__(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        is_neox: bool,
    ) -> None:
        if not len(positions):
            return
        cos, sin = tables(positions, cos_sin, is_neox)
        size = cos_sin.shape[-1]
        for x in (q, k):
            part = x[..., :size]
            turned = torch.ops.npu.npu_rotary_mul(
                part.float().unsqueeze(0), cos, sin, "half" if is_neox else "interleave"
            )
            part.copy_(turned[0])


class ApplyRotary:
    """Whole heads of 64 or 128 in halves: one call for q and k."""

    def __init__(self, query: RotaryQuery, runtime: DeviceRuntime) -> None:
        pass

    def __call__(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        is_neox: bool,
    ) -> None:
        if not len(positions):
            return
        cos, sin = tables(positions, cos_sin, is_neox)
        turned = torch.ops.npu.npu_apply_rotary_pos_emb(
            q.float().unsqueeze(0), k.float().unsqueeze(0), cos, sin, "BSND", "half"
        )
        q.copy_(turned[0][0])
        k.copy_(turned[1][0])


def tables(
    positions: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [1, T, 1, R] float32 of each position, one for each of the R rotated dimensions.

    The ops want tables of the dtype of q: float32 for both, for a table rounded to bfloat16 is off in the third digit.
    """
    halves = cos_sin.index_select(0, positions).view(1, len(positions), 1, -1).chunk(2, dim=-1)
    if is_neox:
        cos, sin = (torch.cat([half, half], dim=-1) for half in halves)
    else:
        cos, sin = (half.repeat_interleave(2, dim=-1) for half in halves)
    return cos, sin


class Swiglu:
    def __init__(self, query: ActivationQuery, runtime: DeviceRuntime) -> None:
        pass

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.npu.npu_swiglu(x, -1)
        return y


class Geglu:
    """GELU by the error function."""

    tanh = 0

    def __init__(self, query: ActivationQuery, runtime: DeviceRuntime) -> None:
        pass

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.npu.npu_geglu(x, -1, self.tanh, True)[0]  # the left is gated
        return y


class GegluTanh(Geglu):
    tanh = 1
