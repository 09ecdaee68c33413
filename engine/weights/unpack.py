"""GGUF blocks to float32 in torch, on whatever device they lie: the operations of dequant.py in the same order."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.engine.weights.ggml_types import GGMLType

Tensor = torch.Tensor

# Types whose values are numbers of torch's own, by ggml's name.
PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def unpack(kind: GGMLType, raw: Tensor) -> Tensor:
    """The values of `raw` (whole blocks, uint8, contiguous) as a new flat tensor: float32, or the plain type as it is.

    KeyError for a type that is not readable.
    """
    if kind.name in PLAIN:
        return raw.view(PLAIN[kind.name])
    fields, convert = _FORMATS[kind.name]
    return convert(*raw.view(-1, kind.size).split(fields, dim=1)).flatten()


def _half(field: Tensor) -> Tensor:
    """fp16 numbers [n, 2 k bytes] as float32 [n, k]."""
    return field.contiguous().view(torch.float16).float()


def _signed(field: Tensor) -> Tensor:
    return field.contiguous().view(torch.int8)


def _parts(packed: Tensor, group: int, bits: int) -> Tensor:
    """[n, bytes] -> [n, 8 / bits * bytes]: of every `group` bytes the lowest `bits` bits, then the next ones."""
    n, count = packed.shape
    packed = packed.view(n, count // group, group)
    mask = (1 << bits) - 1
    return torch.stack([packed >> at & mask for at in range(0, 8, bits)], dim=2).view(n, -1)


def _scaled(q: Tensor, scales: Tensor) -> Tensor:
    """q [n, values] * scales [n, groups], each for values / groups of them -> [n, groups, values / groups]."""
    n, groups = scales.shape
    return q.view(n, groups, -1).float() * scales.unsqueeze(2)


def _nibbles(qs: Tensor) -> Tensor:
    """Of one block of 32."""
    return torch.cat((qs & 15, qs >> 4), dim=1)


def _fifth(qh: Tensor) -> Tensor:
    """The mask of Q5_0 and Q5_1 [n, 4] as 0 or 16 [n, 32]."""
    return _parts(qh, 1, 1) << 4


def _q4_0(d: Tensor, qs: Tensor) -> Tensor:
    return (_nibbles(qs).float() - 8) * _half(d)


def _q4_1(d: Tensor, m: Tensor, qs: Tensor) -> Tensor:
    return _nibbles(qs).float() * _half(d) + _half(m)


def _q5_0(d: Tensor, qh: Tensor, qs: Tensor) -> Tensor:
    return ((_nibbles(qs) | _fifth(qh)).float() - 16) * _half(d)


def _q5_1(d: Tensor, m: Tensor, qh: Tensor, qs: Tensor) -> Tensor:
    return (_nibbles(qs) | _fifth(qh)).float() * _half(d) + _half(m)


def _q8_0(d: Tensor, qs: Tensor) -> Tensor:
    return _signed(qs).float() * _half(d)


def _q2_k(scales: Tensor, qs: Tensor, d: Tensor, dmin: Tensor) -> Tensor:
    low, high = _half(d) * (scales & 15).float(), _half(dmin) * (scales >> 4).float()
    return _scaled(_parts(qs.contiguous(), 32, 2), low) - high.unsqueeze(2)


def _q3_k(hmask: Tensor, qs: Tensor, packed: Tensor, d: Tensor) -> Tensor:
    packed = packed.contiguous()
    # 16 scales of six bits: the low four in bytes 0 to 7, the high two in bytes 8 to 11
    low, high = packed[:, :8].contiguous(), packed[:, 8:].contiguous()
    scales = (_parts(low, 8, 4) | _parts(high, 4, 2) << 4).float() - 32
    bits = _parts(hmask.contiguous(), 32, 1).to(torch.int8)
    q = _parts(qs.contiguous(), 32, 2).to(torch.int8) + (bits - 1) * 4  # bit clear: minus 4
    return _scaled(q, _half(d) * scales)


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 bytes of Q4_K and Q5_K [n, 12] as eight scales and eight minima [n, 8]."""
    a, b, c = packed.split(4, dim=1)
    scales = torch.cat((a & 63, c & 15 | a >> 2 & 48), dim=1)
    minima = torch.cat((b & 63, c >> 4 | b >> 2 & 48), dim=1)
    return scales.float(), minima.float()


def _q4_k(d: Tensor, dmin: Tensor, packed: Tensor, qs: Tensor) -> Tensor:
    scales, minima = _six_bit_pairs(packed)
    values = _scaled(_parts(qs.contiguous(), 32, 4), _half(d) * scales)
    return values - (_half(dmin) * minima).unsqueeze(2)


def _q5_k(d: Tensor, dmin: Tensor, packed: Tensor, qh: Tensor, qs: Tensor) -> Tensor:
    scales, minima = _six_bit_pairs(packed)
    q = _parts(qs.contiguous(), 32, 4) | _parts(qh.contiguous(), 32, 1) << 4
    return _scaled(q, _half(d) * scales) - (_half(dmin) * minima).unsqueeze(2)


def _q6_k(ql: Tensor, qh: Tensor, scales: Tensor, d: Tensor) -> Tensor:
    q = _parts(ql.contiguous(), 64, 4) | _parts(qh.contiguous(), 32, 2) << 4
    return _scaled(q.to(torch.int8) - 32, _half(d) * _signed(scales).float())


# Bytes of each part of a block, in ggml's order, and what makes values of them.
_FORMATS: dict[str, tuple[list[int], Callable[..., Tensor]]] = {
    "Q4_0": ([2, 16], _q4_0),
    "Q4_1": ([2, 2, 16], _q4_1),
    "Q5_0": ([2, 4, 16], _q5_0),
    "Q5_1": ([2, 2, 4, 16], _q5_1),
    "Q8_0": ([2, 32], _q8_0),
    "Q2_K": ([16, 64, 2, 2], _q2_k),
    "Q3_K": ([32, 64, 12, 2], _q3_k),
    "Q4_K": ([2, 2, 12, 128], _q4_k),
    "Q5_K": ([2, 2, 12, 32, 128], _q5_k),
    "Q6_K": ([128, 64, 16, 2], _q6_k),
}
