"""Weights straight to a device: pinned pieces, conversion and dequantization there, shards, files that shrink."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.engine.weights import dequant
from headrace.engine.weights.dequant import dequantize_array
from headrace.engine.weights.ggml_types import GGML_TYPES, READABLE
from headrace.engine.weights.mapped_tensor import MappedTensor, Stored
from headrace.engine.weights.mapping import map_file
from headrace.engine.weights.source import ModelError
from headrace.engine.weights.unpack import PLAIN, unpack
from headrace.engine.weights.upload import Uploader

KINDS = {kind.name: kind for kind in GGML_TYPES.values()}
QUANTIZED = [name for name in READABLE if name not in PLAIN]
ROWS, COLS = 24, 512


class LateEvent:
    """Complete when it is waited for; the copies before it are made only then."""

    def __init__(self, runtime: LateRuntime) -> None:
        self._runtime = runtime

    def record(self, stream: Any = None) -> None:
        return None

    def synchronize(self) -> None:
        self._runtime.waits += 1


class LateRuntime:
    """Host memory that is handed out as pinned; counts pieces and waits."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.pinned: list[torch.Tensor] = []
        self.waits = 0

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.pinned.append(torch.empty(shape, dtype=dtype))
        return self.pinned[-1]

    def event(self) -> LateEvent:
        return LateEvent(self)

    def synchronize(self) -> None:
        return None


def blocks(name: str, count: int) -> np.ndarray:
    """Any bytes whose scales are finite numbers."""
    kind, rng = KINDS[name], np.random.default_rng(7)
    if name in PLAIN:
        values = torch.from_numpy(rng.standard_normal(count)).to(PLAIN[name])
        return values.view(torch.uint8).numpy()
    raw = rng.integers(0, 256, count // kind.block * kind.size, dtype=np.uint8)
    layout, _ = dequant._FORMATS[name]
    view = raw.view(layout)
    for field in ("d", "m", "dmin"):
        if field in layout.names:
            view[field] = rng.standard_normal(len(view)).astype(np.float16)
    return raw


def stored(
    tmp_path: Path, name: str, upload: Uploader | None, order: np.ndarray | None = None
) -> MappedTensor:
    path = tmp_path / f"{name}.bin"
    path.write_bytes(b"head" + blocks(name, ROWS * COLS).tobytes())
    place = Stored(str(path), map_file(str(path)), 4)
    return MappedTensor("w", (ROWS, COLS), KINDS[name], place, order, upload)


@pytest.mark.parametrize("name", QUANTIZED)
def test_blocks_unpack_in_torch_as_in_numpy(name):
    raw = blocks(name, 64 * 256)
    ours = unpack(KINDS[name], torch.from_numpy(raw.copy()))
    assert ours.dtype == torch.float32
    assert np.array_equal(ours.numpy(), dequantize_array(dequant.READABLE[name], raw))


PARTS = [
    (None, None),
    (slice(8, 20), None),
    (None, slice(256, 512)),
    (slice(3, 17), slice(96, 288)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("name", READABLE)
def test_what_is_sent_is_what_is_read(tmp_path, name, shuffled, dtype):
    """Pieces much smaller than the tensor, as large tensors have; the host's way is the truth."""
    order = np.random.default_rng(1).permutation(ROWS) if shuffled else None
    upload = Uploader(LateRuntime(), piece=4096, pieces=3)
    handle = stored(tmp_path, name, upload, order)
    for rows, cols in PARTS:
        want = handle.read(dtype, rows, cols)
        out = torch.full_like(want, float("nan"))
        handle.read_into(out, rows, cols)
        assert torch.equal(out, want), (rows, cols)
        alone = torch.full_like(want, float("nan"))
        stored(tmp_path, name, None, order).read_into(alone, rows, cols)
        assert torch.equal(alone, want), (rows, cols)
    upload.close()


def test_pieces_are_few_and_waited_for(tmp_path):
    runtime = LateRuntime()
    upload = Uploader(runtime, piece=4096, pieces=3)
    handle = stored(tmp_path, "F32", upload)
    handle.read_into(torch.empty(ROWS, COLS))
    pieces = ROWS * COLS * 4 // 4096
    assert len(runtime.pinned) <= 3
    assert runtime.waits == pieces - len(runtime.pinned)


def test_threads_share_the_pieces(tmp_path):
    upload = Uploader(LateRuntime(), piece=2048, pieces=2)
    handles = [stored(tmp_path, name, upload) for name in ("F32", "BF16", "Q4_0", "Q6_K")]
    want = [handle.read(torch.float32) for handle in handles]
    got = [torch.empty_like(values) for values in want]
    threads = [
        threading.Thread(target=handle.read_into, args=(out,))
        for handle, out in zip(handles, got, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_only_the_shard_is_read(tmp_path, monkeypatch):
    upload = Uploader(LateRuntime(), piece=1 << 20)
    handle, seen = stored(tmp_path, "BF16", upload), []
    real = os.preadv

    def preadv(file: int, buffers: Any, offset: int) -> int:
        seen.append((offset, sum(len(one) for one in buffers)))
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    handle.read_into(torch.empty(6, COLS, dtype=torch.bfloat16), slice(12, 18))
    assert seen == [(4 + 12 * COLS * 2, 6 * COLS * 2)]


def test_a_file_that_shrank_is_told(tmp_path):
    upload = Uploader(LateRuntime())
    handle = stored(tmp_path, "F32", upload)
    os.truncate(tmp_path / "F32.bin", 1000)
    with pytest.raises(ModelError, match="shorter while it was read"):
        handle.read_into(torch.empty(ROWS, COLS))
    # the piece is free again
    os.truncate(tmp_path / "F32.bin", 4 + ROWS * COLS * 4)
    handle.read_into(torch.empty(ROWS, COLS))


def test_units_larger_than_a_piece_are_refused():
    upload = Uploader(LateRuntime(), piece=64)
    with pytest.raises(ValueError, match="do not fit"):
        upload.send(torch.empty(256, dtype=torch.uint8), SimpleNamespace(), unit=65)
