"""Norms, rotary embedding, experts and 4-bit linears of Intel's extension for PyTorch, by the contracts of
headrace.platforms.ops. Called through `ipex.llm`, whose functions pick the device's kernels."""

from __future__ import annotations

from typing import Any

import torch
from intel_extension_for_pytorch.llm import functional, quantization
from intel_extension_for_pytorch.llm.modules import GatedMLPMOE

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.linear import ExpertsImpl, LinearImpl
from headrace.platforms.queries import RotaryQuery


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    result: torch.Tensor = functional.rms_norm(x.contiguous(), weight, eps)
    return result


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fused kernel takes weights of x's dtype only; finer ones are not rounded for it."""
    if weight.dtype != x.dtype or not residual.is_contiguous():
        residual = residual + x
        return rms_norm(residual, weight, eps), residual
    return functional.add_rms_norm(residual, x.contiguous(), weight, None, eps, True), residual


class IpexRotary:
    """Whole heads, halves against halves. The angles are gathered by position before the call."""

    def __init__(self, query: RotaryQuery, runtime: DeviceRuntime) -> None:
        self._size = query.head_dim

    def __call__(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        is_neox: bool,
    ) -> None:
        if not q.shape[0]:
            return
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D / 2]
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        turned = functional.rotary_embedding(q, k, sin, cos, self._size, True)
        for given, result in zip((q, k), turned, strict=True):
            if result.data_ptr() != given.data_ptr():  # GPUs write in place, CPUs into new memory
                given.copy_(result.view(given.shape))


class IpexExperts(ExpertsImpl):
    """The module chooses experts from router logits by itself: it is given logits whose order is the choice made, and
    the weights by its hook for other ways of routing."""

    def pack(self, w13: Any, w2: Any) -> Any:
        dtype = getattr(torch, self.query.dtype)
        # the module lays the weights out anew at its first call and drops these
        return GatedMLPMOE(w13.to(dtype), w2.to(dtype), use_prepack=False)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Any
    ) -> torch.Tensor:
        query = self.query
        order = torch.arange(query.top_k, 0, -1, dtype=torch.float32, device=x.device)
        logits = torch.full((x.shape[0], query.experts), -torch.inf, device=x.device)
        logits.scatter_(1, ids.long(), order.expand(ids.shape))

        def route(**_: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return weights, ids

        result: torch.Tensor = packed(
            x.contiguous(), False, query.top_k, logits, False, custom_routing_function=route
        )
        return result


# Q4_0 of GGUF: blocks of 32 numbers, a float16 scale and 16 bytes; byte i holds number i in its low half and number
# i + 16 in its high half, each 8 too large.
BLOCK, BLOCK_BYTES = 32, 18


def unpack_q4_0(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows uint8 [out, in / 32 * 18] -> numbers uint8 [out, in] of 0 .. 15, scales float16 [out, in / 32]."""
    blocks = rows.view(rows.shape[0], -1, BLOCK_BYTES)
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
    halves = blocks[..., 2:]
    numbers = torch.cat((halves & 15, halves >> 4), dim=-1)
    return numbers.flatten(1), scales


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, columns] of 0 .. 15 -> int32 [rows / 8, columns]: eight rows in a word, the first one lowest."""
    words = torch.zeros(numbers.shape[0] // 8, numbers.shape[1], dtype=torch.int32)
    for i in range(8):
        words |= numbers[i::8].to(torch.int32) << 4 * i
    return words


class IpexInt4Linear(LinearImpl):
    """Q4_0 blocks as they are, in GPTQ's order: int32 [in / 8, out], scales [in / 32, out], all zero points 8."""

    def pack(self, weight: Any, bias: torch.Tensor | None) -> Any:
        query, device = self.query, self.runtime.device
        dtype = getattr(torch, query.dtype)
        numbers, scales = unpack_q4_0(torch.as_tensor(weight))
        groups = query.in_features // BLOCK
        # GPTQ stores a zero point less by one, eight in a word
        zeros = torch.full((groups, query.out_features // 8), 0x77777777, dtype=torch.int32)
        return quantization.IPEXWeightOnlyQuantizedLinear.from_weight(
            pack_int4(numbers.t().contiguous()).to(device),
            scales.t().contiguous().to(device, dtype),
            zeros.to(device),
            query.in_features,
            query.out_features,
            bias=None if bias is None else bias.to(device, dtype),
            group_size=BLOCK,
            quant_method=quantization.QuantMethod.GPTQ_GEMM,
            dtype=quantization.QuantDtype.INT4,
        )

    def __call__(
        self, x: torch.Tensor, packed: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        result: torch.Tensor = packed(x.contiguous())
        wanted = getattr(torch, self.query.out_dtype or self.query.dtype)
        return result.to(wanted) if out is None else out.copy_(result)
