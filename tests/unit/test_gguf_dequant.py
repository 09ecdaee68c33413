"""Dequantization bit for bit against the `gguf` package, and reads of shards against whole reads."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights import dequant
from headrace.engine.weights.dequant import dequantize_array
from headrace.engine.weights.ggml_types import GGML_TYPES, READABLE
from headrace.engine.weights.gguf import GGUFFile
from headrace.engine.weights.gguf_source import GGUFSource
from headrace.engine.weights.mapped_tensor import MappedTensor, Stored
from headrace.engine.weights.mapping import map_file
from headrace.engine.weights.source import ModelFiles

BLOCK_TYPES = [name for name in READABLE if name not in ("F32", "F16", "BF16")]


def finite_blocks(name: str, count: int, seed: int) -> np.ndarray:
    """Random blocks, every bit pattern of a quant, with scales that are finite."""
    layout = dequant._FORMATS[name][0]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, count * layout.itemsize, dtype=np.uint8)
    blocks = raw.view(layout)
    for field in ("d", "m", "dmin"):
        if field in layout.names:
            blocks[field] = rng.normal(0, 0.1, count).astype(np.float16)
    return raw


def reference(name: str, raw: np.ndarray) -> np.ndarray:
    kind = GGMLQuantizationType[name]
    native = {"F32": np.float32, "F16": np.float16}.get(name)
    data = raw.view(native) if native else raw
    return gguf.quants.dequantize(data.reshape(1, -1), kind).astype(np.float32).reshape(-1)


@pytest.mark.parametrize("name", READABLE)
@pytest.mark.parametrize("count", [1, 3, 1100])
def test_equals_the_gguf_package_bit_for_bit(name, count):
    kind = dequant.READABLE[name]
    raw = finite_blocks(name, count, 1) if name in BLOCK_TYPES else None
    if raw is None:
        values = np.random.default_rng(2).normal(size=count * 32).astype(np.float32)
        values[:4] = (0.0, -0.0, 65504.0, 6e-8)
        raw = gguf.quants.quantize(values, GGMLQuantizationType[name]).view(np.uint8).reshape(-1)
    ours, theirs = dequantize_array(kind, raw), reference(name, raw)
    assert ours.dtype == np.float32
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("name", READABLE)
def test_special_values_are_those_of_the_gguf_package(name):
    """Any bytes at all, infinities and NaN among the scales."""
    kind = dequant.READABLE[name]
    raw = np.random.default_rng(3).integers(0, 256, 512 * kind.size, dtype=np.uint8)
    with np.errstate(all="ignore"):
        ours, theirs = dequantize_array(kind, raw), reference(name, raw)
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    real = ~np.isnan(theirs)
    assert np.array_equal(ours[real].view(np.uint32), theirs[real].view(np.uint32))


def mapped(file: GGUFFile, order=None) -> MappedTensor:
    stored = file.tensors["t"]
    part = file.parts[stored.part]
    place = Stored(part.path, part.data, stored.offset)
    return MappedTensor("t", stored.shape, stored.type, place, order)


def handle(
    tmp_path, name: str, rows: int, cols: int, order=None
) -> tuple[MappedTensor, np.ndarray]:
    """A stored matrix of one type and its values."""
    kind = dequant.READABLE[name]
    if name in BLOCK_TYPES:
        raw = finite_blocks(name, rows * cols // kind.block, 5)
    else:
        values = np.random.default_rng(6).normal(size=(rows, cols)).astype(np.float32)
        raw = gguf.quants.quantize(values, GGMLQuantizationType[name]).view(np.uint8).reshape(-1)
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tensor("t", raw.reshape(rows, -1), raw_dtype=GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(str(tmp_path / "m.gguf"))
    values = reference(name, raw).reshape(rows, cols)
    return mapped(file, order), values


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("reordered", [False, True])
def test_shards_are_slices_of_the_whole(tmp_path, name, reordered):
    rows, cols = 96, 512
    order = np.random.default_rng(7).permutation(rows) if reordered else None
    stored, values = handle(tmp_path, name, rows, cols, order)
    whole = torch.from_numpy(values if order is None else values[order])
    assert torch.equal(stored.read(torch.float32), whole)
    # Columns on block bounds and off them, as tensor parallelism may ask.
    for part in (
        slice(0, 256),
        slice(256, 512),
        slice(100, 391),
        slice(511, 512),
        slice(9, 9),
        None,
    ):
        for lines in (slice(0, 48), slice(48, 96), slice(5, 6), slice(3, 3), None):
            got = stored.read(torch.float32, lines, part)
            assert got.is_contiguous()
            assert torch.equal(got, whole[lines or slice(None), part or slice(None)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q5_0"])
def test_other_dtypes_round_once(tmp_path, name, dtype):
    stored, values = handle(tmp_path, name, 70, 1024)
    got = stored.read(dtype)
    assert got.dtype == dtype
    assert torch.equal(got, torch.from_numpy(values).to(dtype))


def test_vectors_are_cut_by_rows(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    values = np.arange(64, dtype=np.float32)
    writer.add_tensor("t", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(str(tmp_path / "m.gguf"))
    order = np.random.default_rng(1).permutation(64)
    for chosen in (None, order):
        stored = mapped(file, chosen)
        whole = values if chosen is None else values[chosen]
        assert stored.shape == (64,)
        assert stored.read(torch.float32).tolist() == whole.tolist()
        assert stored.read(torch.bfloat16, slice(8, 24)).tolist() == whole[8:24].tolist()


def test_blocks_are_the_stored_bytes(tmp_path):
    order = np.arange(96)[::-1].copy()
    for chosen in (None, order):
        stored, _ = handle(tmp_path, "Q4_1", 96, 64, chosen)
        raw = stored.blocks()
        assert raw.shape == (96, 40)
        assert raw.dtype == np.uint8
        part = np.ascontiguousarray(stored.blocks(slice(10, 20)))
        values = dequantize_array(dequant.READABLE["Q4_1"], part.reshape(-1)).reshape(10, 64)
        assert np.array_equal(values, stored.read(torch.float32, slice(10, 20)).numpy())


def test_blocks_are_not_copied(tmp_path):
    stored, _ = handle(tmp_path, "Q4_1", 96, 64)
    assert np.shares_memory(stored.blocks(slice(3, 5)), stored.blocks())


def test_extra_memory_is_small(tmp_path):
    """Besides the result, a read holds a few chunks, not a float32 copy of the tensor."""
    import tracemalloc

    stored, _ = handle(tmp_path, "Q4_1", 4096, 1024)
    tracemalloc.start()
    stored.read(torch.bfloat16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20  # the float32 copy would be 16 MiB


def test_close_while_an_array_looks_at_the_file(tmp_path):
    stored, values = handle(tmp_path, "Q4_1", 96, 64)
    file = GGUFFile(str(tmp_path / "m.gguf"))
    spec = ModelSpec("qwen2", 1, 64, 64, 2, 2, 32, 96, 64, 1e-6)
    source = GGUFSource(ModelFiles("m", "gguf", str(tmp_path), ()), file, spec)
    kept = source.get("t")
    source.close()
    assert np.array_equal(kept.read(torch.float32).numpy(), values)
    del stored


def resident(data: np.ndarray) -> int:
    """Bytes of this process's memory that lie in the file behind the array."""
    address, found = data.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (first := line.split()[0]) and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            found = low <= address < high
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_dropped_rows_need_no_memory_and_can_be_read_again(tmp_path):
    rows, cols = 4096, 1024
    kind = GGML_TYPES[8]
    raw = finite_blocks("Q8_0", rows * cols // kind.block, 7)
    path = tmp_path / "raw.bin"
    path.write_bytes(raw.tobytes())
    stored = MappedTensor("w", (rows, cols), kind, Stored(str(path), map_file(str(path)), 0))
    blocks = stored.blocks(slice(0, 4000))
    total = int(blocks.sum(dtype=np.int64))
    before = resident(blocks)
    blocks.drop(0, 2000)
    assert resident(blocks) < before - 1900 * blocks.shape[1]
    assert int(blocks.sum(dtype=np.int64)) == total
    assert blocks[:, :34].drop is None  # a slice is not whole rows
