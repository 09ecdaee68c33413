"""Float matrices as GGUF blocks of 32 weights, made at load (--quantization)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.weights.source import TensorHandle

BLOCK = 32
# Weights encoded at once: the temporaries then stay in a core's cache.
_CHUNK = 1 << 17
# Q4_0 numbers reach from -8 to 7. The largest weight of a block is tried at these places, each with the scale that fits
# its numbers best: the squared error falls by a tenth against the plain -8.
_PLACES = (-8.5, -8.0, -7.5, -7.0)


class EncodedTensor(TensorHandle):
    """A TensorHandle whose blocks are made from another's values."""

    def __init__(self, stored: TensorHandle, scheme: str):
        self.name, self.shape, self.scheme = stored.name, stored.shape, scheme
        self._stored = stored

    def read(
        self, dtype: torch.dtype, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        return self._stored.read(dtype, rows, cols)

    def read_into(
        self, out: torch.Tensor, rows: slice | None = None, cols: slice | None = None
    ) -> None:
        self._stored.read_into(out, rows, cols)

    def blocks(self, rows: slice | None = None) -> NDArray[np.uint8]:
        low, high, _ = (rows or slice(None)).indices(self.shape[0])
        width = self.shape[1]
        step = max(1, _CHUNK // width)
        out = np.empty((high - low, row_bytes(self.scheme, width)), np.uint8)
        for start in range(low, high, step):
            stop = min(start + step, high)
            values = self._stored.read(torch.float32, slice(start, stop))
            out[start - low : stop - low] = encode(values, self.scheme)
        return out


def encoded(
    tensors: Mapping[str, TensorHandle], schemes: Mapping[str, str]
) -> dict[str, TensorHandle]:
    """`tensors` with blocks of the scheme each is wanted in, where it is stored in another."""
    return {
        name: handle
        if schemes.get(name, handle.scheme) == handle.scheme
        else EncodedTensor(handle, schemes[name])
        for name, handle in tensors.items()
    }


def row_bytes(scheme: str, width: int) -> int:
    return width // BLOCK * {"Q8_0": 34, "Q4_0": 18}[scheme]


def encode(values: torch.Tensor, scheme: str) -> NDArray[np.uint8]:
    """values float32 [R, K], K a multiple of 32 -> uint8 [R, bytes of a row] as GGUF stores the type."""
    blocks = values.reshape(-1, BLOCK)
    scale, numbers = {"Q8_0": _q8_0, "Q4_0": _q4_0}[scheme](blocks)
    out = np.empty((len(blocks), row_bytes(scheme, BLOCK)), np.uint8)
    out[:, :2] = scale.numpy().view(np.uint8)
    out[:, 2:] = numbers.numpy().view(np.uint8)
    return out.reshape(len(values), -1)


def _q8_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale fp16 [N, 1] and numbers int8 [N, 32]."""
    low, high = torch.aminmax(blocks, dim=1, keepdim=True)
    scale = (torch.maximum(high, -low) / 127).half()
    return scale, (blocks * _inverse(scale)).round_().clamp_(-127, 127).to(torch.int8)


def _q4_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale fp16 [N, 1] and 16 bytes [N, 16]: number + 8 of weight i in the low, of i + 16 in the high half."""
    low, high = torch.aminmax(blocks, dim=1, keepdim=True)
    top = torch.where(high > -low, high, low)  # the largest, with its sign
    best, most = torch.zeros_like(top), torch.full_like(top, -1.0)
    numbers = torch.empty_like(blocks)
    for place in _PLACES:
        torch.mul(blocks, _inverse(top / place), out=numbers).round_().clamp_(-8, 7)
        # With numbers q the error is least at the scale (x q) / (q q), and is then x x - (x q)^2 / (q q).
        xq = torch.linalg.vecdot(blocks, numbers).unsqueeze(1)
        qq = torch.linalg.vecdot(numbers, numbers).unsqueeze(1).clamp_(min=1.0)
        gain = xq * xq / qq
        better = gain > most
        best, most = torch.where(better, xq / qq, best), torch.where(better, gain, most)
    scale = best.half()
    torch.mul(blocks, _inverse(scale), out=numbers).round_().clamp_(-8, 7).add_(8)
    stored = numbers.to(torch.uint8)
    return scale, stored[:, :16] | stored[:, 16:] << 4


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, and 0 for blocks of zeros (or of what fp16 rounds to it)."""
    scale = scale.float()
    return torch.where(scale == 0, 0.0, scale.reciprocal())
