"""GGUF blocks to float32, bit for bit what the `gguf` package computes: the same operations in the same order.

Torch-free. One function a type; each gets the blocks of a chunk as a structured array (one field for each part of a
block, as ggml lays it out) and writes float32 values [blocks, values a block]. `dequantize` walks over a tensor in
chunks that stay in a core's cache, so that the extra memory is a few hundred KiB a thread whatever the tensor's size.
numpy releases the interpreter lock inside its loops: several tensors can be read by several threads.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace.engine.weights.ggml_types import GGML_TYPES, GGMLType

F32 = NDArray[np.float32]
Blocks = NDArray[np.void]

# Values of a chunk. Below 32768, the size from which torch would split the copy behind it over its own threads.
CHUNK = 32512


def dequantize(kind: GGMLType, raw: NDArray[np.uint8], store: Callable[[int, F32], None]) -> None:
    """Hands the values of `raw` (whole blocks, uint8, contiguous) to `store(first value, float32 [n])` in order.

    The array given to `store` is used again for the next chunk. KeyError for a type that is not readable.
    """
    layout, convert = _FORMATS[kind.name]
    blocks = raw.reshape(-1).view(layout)
    step = max(1, CHUNK // kind.block)
    buffer = np.empty((min(step, len(blocks)), kind.block), np.float32)
    for start in range(0, len(blocks), step):
        chunk = blocks[start : start + step]
        out = buffer[: len(chunk)]
        convert(chunk, out)
        store(start * kind.block, out.reshape(-1))


def dequantize_array(kind: GGMLType, raw: NDArray[np.uint8]) -> F32:
    """All values of `raw` (whole blocks, uint8) as a new flat float32 array."""
    out = np.empty(raw.size // kind.size * kind.block, np.float32)

    def store(start: int, values: F32) -> None:
        out[start : start + len(values)] = values

    dequantize(kind, raw, store)
    return out


def _f32(field: NDArray[np.float16]) -> F32:
    """Half-precision block scales [n] as float32 [n, 1]."""
    return field.astype(np.float32).reshape(-1, 1)


def _nibbles(packed: NDArray[np.uint8], group: int) -> NDArray[np.uint8]:
    """[n, bytes] -> [n, 2 * bytes]: of every `group` bytes the low halves, then the high halves."""
    n, count = packed.shape
    packed = packed.reshape(n, count // group, 1, group)
    out = np.empty((n, count // group, 2, group), np.uint8)
    np.bitwise_and(packed[:, :, 0], 15, out=out[:, :, 0])
    np.right_shift(packed[:, :, 0], 4, out=out[:, :, 1])
    return out.reshape(n, 2 * count)


def _crumbs(packed: NDArray[np.uint8], group: int) -> NDArray[np.uint8]:
    """[n, bytes] -> [n, 4 * bytes]: two bits of every `group` bytes, the lowest first."""
    n, count = packed.shape
    packed = packed.reshape(n, count // group, group)
    out = np.empty((n, count // group, 4, group), np.uint8)
    for i in range(4):
        np.right_shift(packed, 2 * i, out=out[:, :, i])
    out &= 3
    return out.reshape(n, 4 * count)


def _bits(packed: NDArray[np.uint8], group: int) -> NDArray[np.uint8]:
    """[n, bytes] -> [n, 8 * bytes]: one bit of every `group` bytes, the lowest first."""
    n, count = packed.shape
    packed = packed.reshape(n, count // group, group)
    out = np.empty((n, count // group, 8, group), np.uint8)
    for i in range(8):
        np.right_shift(packed, i, out=out[:, :, i])
    out &= 1
    return out.reshape(n, 8 * count)


def _fifth_bits(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The 32-bit mask of Q5_0 and Q5_1 [n, 4] as 0 or 16 [n, 32]."""
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    bits <<= 4
    return bits


def _scaled(out: F32, q: NDArray[np.generic], scales: F32) -> F32:
    """out [n, values] = q * scales, with scales [n, groups] each for values / groups of them. Returns out in groups."""
    n, groups = scales.shape
    view = out.reshape(n, groups, -1)
    view[...] = q.reshape(view.shape)
    view *= scales[:, :, None]
    return view


def _plain(blocks: Blocks, out: F32) -> None:
    out[:, 0] = blocks["x"]


def _bf16(blocks: Blocks, out: F32) -> None:
    wide = blocks["x"].astype(np.uint32)
    wide <<= 16
    out[:, 0] = wide.view(np.float32)


def _q4_0(blocks: Blocks, out: F32) -> None:
    out[...] = _nibbles(blocks["qs"], 16)
    out -= 8  # exact: small integers
    out *= _f32(blocks["d"])


def _q4_1(blocks: Blocks, out: F32) -> None:
    out[...] = _nibbles(blocks["qs"], 16)
    out *= _f32(blocks["d"])
    out += _f32(blocks["m"])


def _q5_0(blocks: Blocks, out: F32) -> None:
    q = _nibbles(blocks["qs"], 16)
    q |= _fifth_bits(blocks["qh"])
    out[...] = q
    out -= 16
    out *= _f32(blocks["d"])


def _q5_1(blocks: Blocks, out: F32) -> None:
    q = _nibbles(blocks["qs"], 16)
    q |= _fifth_bits(blocks["qh"])
    out[...] = q
    out *= _f32(blocks["d"])
    out += _f32(blocks["m"])


def _q8_0(blocks: Blocks, out: F32) -> None:
    out[...] = blocks["qs"]
    out *= _f32(blocks["d"])


def _q2_k(blocks: Blocks, out: F32) -> None:
    scales = blocks["scales"]
    low = _f32(blocks["d"]) * (scales & 15).astype(np.float32)
    high = _f32(blocks["dmin"]) * (scales >> 4).astype(np.float32)
    view = _scaled(out, _crumbs(blocks["qs"], 32), low)
    view -= high[:, :, None]


def _q3_k(blocks: Blocks, out: F32) -> None:
    packed = blocks["scales"]
    # 16 scales of six bits: the low four in bytes 0 to 7, the high two in bytes 8 to 11.
    six = _nibbles(packed[:, :8], 8) | (_crumbs(packed[:, 8:], 4) << 4)
    scales = six.astype(np.float32) - np.float32(32)
    q = _crumbs(blocks["qs"], 32).view(np.int8)
    q += (_bits(blocks["hmask"], 32).view(np.int8) - np.int8(1)) * np.int8(4)  # bit clear: minus 4
    _scaled(out, q, _f32(blocks["d"]) * scales)


def _six_bit_pairs(packed: NDArray[np.uint8]) -> tuple[F32, F32]:
    """The 12 bytes of Q4_K and Q5_K [n, 12] as eight scales and eight minima [n, 8]."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 2) & 48)], axis=1)
    minima = np.concatenate([b & 63, (c >> 4) | ((b >> 2) & 48)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q4_k(blocks: Blocks, out: F32) -> None:
    scales, minima = _six_bit_pairs(blocks["scales"])
    view = _scaled(out, _nibbles(blocks["qs"], 32), _f32(blocks["d"]) * scales)
    view -= (_f32(blocks["dmin"]) * minima)[:, :, None]


def _q5_k(blocks: Blocks, out: F32) -> None:
    scales, minima = _six_bit_pairs(blocks["scales"])
    q = _nibbles(blocks["qs"], 32)
    q |= _bits(blocks["qh"], 32) << 4
    view = _scaled(out, q, _f32(blocks["d"]) * scales)
    view -= (_f32(blocks["dmin"]) * minima)[:, :, None]


def _q6_k(blocks: Blocks, out: F32) -> None:
    q = _nibbles(blocks["ql"], 64)
    q |= _crumbs(blocks["qh"], 32) << 4
    scales = _f32(blocks["d"]) * blocks["scales"].astype(np.float32)
    signed = q.view(np.int8)
    signed -= 32
    _scaled(out, signed, scales)


_D = ("d", "<f2")
_M = ("m", "<f2")
_DMIN = ("dmin", "<f2")
_FORMATS: dict[str, tuple[np.dtype[np.void], Callable[[Blocks, F32], None]]] = {
    name: (np.dtype(fields), convert)
    for name, fields, convert in (
        ("F32", [("x", "<f4")], _plain),
        ("F16", [("x", "<f2")], _plain),
        ("BF16", [("x", "<u2")], _bf16),
        ("Q4_0", [_D, ("qs", "u1", 16)], _q4_0),
        ("Q4_1", [_D, _M, ("qs", "u1", 16)], _q4_1),
        ("Q5_0", [_D, ("qh", "u1", 4), ("qs", "u1", 16)], _q5_0),
        ("Q5_1", [_D, _M, ("qh", "u1", 4), ("qs", "u1", 16)], _q5_1),
        ("Q8_0", [_D, ("qs", "i1", 32)], _q8_0),
        ("Q2_K", [("scales", "u1", 16), ("qs", "u1", 64), _D, _DMIN], _q2_k),
        ("Q3_K", [("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), _D], _q3_k),
        ("Q4_K", [_D, _DMIN, ("scales", "u1", 12), ("qs", "u1", 128)], _q4_k),
        ("Q5_K", [_D, _DMIN, ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)], _q5_k),
        ("Q6_K", [("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D], _q6_k),
    )
}
READABLE: dict[str, GGMLType] = {t.name: t for t in GGML_TYPES.values() if t.name in _FORMATS}
