"""The GGUF header reader against the `gguf` package, and every way a file can be wrong."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.engine.weights.gguf import GGUFFile
from headrace.engine.weights.source import ModelError


def write(path: Path, tensors: int = 3, **split) -> Path:
    """A small file with one of every kind of metadata. Returns the path of the (first) file."""
    writer = gguf.GGUFWriter(str(path), "llama", **split)
    writer.add_uint32("a.u32", 7)
    writer.add_int8("a.i8", -3)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "naïve ☃")
    writer.add_array("a.words", ["<s>", "", "Ġhello", "好"])
    writer.add_array("a.scores", [0.5, -1.25])
    writer.add_array("a.flags", [True, False, True])
    writer.add_array("a.ints", [-1, 2**31 - 1])
    for i in range(tensors):
        data = np.arange(8 * (i + 1), dtype=np.float32).reshape(i + 1, 8)
        writer.add_tensor(f"t{i}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first = sorted(path.parent.glob(f"{path.stem}*.gguf"))[0]
    return first


def build(entries: list[tuple[bytes, int, bytes]], tensors: bytes = b"", count: int = 0) -> bytes:
    """A header by hand, for files that no writer would make."""
    out = struct.pack("<4sIQQ", b"GGUF", 3, count, len(entries))
    for key, kind, value in entries:
        out += struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value
    return out + tensors


def strings(*items: bytes) -> bytes:
    body = b"".join(struct.pack("<Q", len(item)) + item for item in items)
    return struct.pack("<IQ", 8, len(items)) + body


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name + dims + struct.pack("<IQ", kind, offset)


def test_metadata_equals_the_gguf_package(tmp_path):
    path = write(tmp_path / "m.gguf")
    reference = gguf.GGUFReader(path)
    with GGUFFile(str(path)) as file:
        ours = dict(file.metadata)
        for key, field in reference.fields.items():
            if not key.startswith("GGUF."):
                assert ours.pop(key) == field.contents(), key
        assert not ours
        assert file.metadata.array_length("a.words") == 4
        assert file.metadata.array_length("a.u32") == 0
        assert file.metadata.get("absent") is None


def test_tensors_equal_the_gguf_package(tmp_path):
    path = write(tmp_path / "m.gguf")
    reference = {t.name: t for t in gguf.GGUFReader(path).tensors}
    with GGUFFile(str(path)) as file:
        assert set(file.tensors) == set(reference)
        for name, ours in file.tensors.items():
            theirs = reference[name]
            assert ours.shape == tuple(reversed(theirs.shape.tolist()))
            assert ours.nbytes == theirs.n_bytes
            assert bytes(file.rows(ours)) == theirs.data.tobytes()


def test_alignment_is_honoured(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_custom_alignment(256)
    for i in range(3):
        writer.add_tensor(f"t{i}", np.full((1, 5), i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(str(tmp_path / "m.gguf")) as file:
        for i in range(3):
            t = file.tensors[f"t{i}"]
            assert t.offset % 256 == 0
            assert np.frombuffer(file.rows(t), np.float32).tolist() == [i] * 5


def test_text_that_is_not_utf8_does_no_harm(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(build([(b"k", 9, strings(b"ok", b"\xff\xfe", b"\xe4\xbd"))]))
    with GGUFFile(str(path)) as file:
        assert file.metadata["k"][0] == "ok"
        assert "\ufffd" in file.metadata["k"][1]
        assert file.metadata.raw_strings("k") == [b"ok", b"\xff\xfe", b"\xe4\xbd"]
        with pytest.raises(KeyError):
            file.metadata.raw_strings("absent")


def test_nested_arrays(tmp_path):
    inner = struct.pack("<IQ2I", 4, 2, 5, 6)
    path = tmp_path / "m.gguf"
    value = struct.pack("<IQ", 9, 3) + inner + struct.pack("<IQ", 9, 1) + strings(b"x") + inner
    path.write_bytes(build([(b"k", 9, value), (b"after", 4, struct.pack("<I", 9))]))
    with GGUFFile(str(path)) as file:
        assert file.metadata["k"] == [[5, 6], [["x"]], [5, 6]]
        assert file.metadata["after"] == 9


def test_version_2(tmp_path):
    path = write(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    data[4] = 2
    path.write_bytes(data)
    with GGUFFile(str(path)) as file:
        assert set(file.tensors) == {"t0", "t1", "t2"}


# A split model (llama.cpp#9613): the first part stands for all; anything else is refused with the way out.


def test_split_first_part_loads_all(tmp_path):
    first = write(tmp_path / "m.gguf", tensors=5, split_max_tensors=2)
    assert first.name == "m-00001-of-00003.gguf"
    with GGUFFile(str(first)) as file:
        assert set(file.tensors) == {f"t{i}" for i in range(5)}
        assert [file.tensors[f"t{i}"].part for i in range(5)] == [0, 0, 1, 1, 2]
        values = np.frombuffer(file.rows(file.tensors["t4"]), np.float32)
        assert values.tolist() == list(range(40))


def test_split_other_part_names_the_first(tmp_path):
    first = write(tmp_path / "m.gguf", tensors=5, split_max_tensors=2)
    second = str(first).replace("00001-of", "00002-of")
    with pytest.raises(ModelError, match=r"part 2 of 3; give the first one: .*m-00001-of-00003"):
        GGUFFile(second)


def test_split_missing_parts_are_listed(tmp_path):
    first = write(tmp_path / "m.gguf", tensors=5, split_max_tensors=2)
    for part in ("00002", "00003"):
        (tmp_path / f"m-{part}-of-00003.gguf").unlink()
    with pytest.raises(
        ModelError, match=r"m-00002-of-00003.gguf, m-00003-of-00003.gguf are missing"
    ):
        GGUFFile(str(first))


@pytest.mark.parametrize("name", ["joined.gguf", "m-00001-of-00003.gguf"])
def test_split_joined_by_cat(tmp_path, name):
    write(tmp_path / "m.gguf", tensors=5, split_max_tensors=2)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    joined = tmp_path / name
    joined.write_bytes(b"".join(p.read_bytes() for p in parts))
    with pytest.raises(ModelError, match=r"joined one behind the other.*llama-gguf-split --merge"):
        GGUFFile(str(joined))


def test_split_renamed_part(tmp_path):
    first = write(tmp_path / "m.gguf", tensors=5, split_max_tensors=2)
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="part 1 of 3 of a split model, but is not named so"):
        GGUFFile(str(renamed))


def test_split_swapped_parts(tmp_path):
    first = write(tmp_path / "m.gguf", tensors=5, split_max_tensors=2)
    second, third = (tmp_path / f"m-0000{i}-of-00003.gguf" for i in (2, 3))
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelError, match="named part 2 but says it is part 3"):
        GGUFFile(str(first))


def test_split_parts_of_unlike_models(tmp_path):
    first = write(tmp_path / "m.gguf", tensors=5, split_max_tensors=2)
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / "m.gguf", tensors=6, split_max_tensors=2)
    third = "m-00003-of-00003.gguf"
    (tmp_path / third).write_bytes((tmp_path / "other" / third).read_bytes())
    with pytest.raises(ModelError, match="hold 6 tensors, but the model has 5"):
        GGUFFile(str(first))


def test_split_short_part_names_its_tensors(tmp_path):
    first = write(tmp_path / "m.gguf", tensors=5, split_max_tensors=2)
    second = tmp_path / "m-00002-of-00003.gguf"
    second.write_bytes(second.read_bytes()[:-64])
    with pytest.raises(ModelError, match=r"m-00002-of-00003.gguf is cut short.*t3"):
        GGUFFile(str(first))


# Damaged files.


def test_cut_short_anywhere(tmp_path):
    """Every length but the whole one is refused with one sentence."""
    whole = write(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(1, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"download it again|GGUF"):
            GGUFFile(str(path))


def test_cut_short_names_the_tensors(tmp_path):
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        ModelError, match=r"cut short: it has .* bytes but needs .* for t1?.*t2; down"
    ):
        GGUFFile(str(path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "no GGUF file"),
        (b"tjgg" + bytes(60), "old GGML format"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian"),
        (build([(b"k", 99, bytes(8))]), "unknown type 99"),
        (build([(b"k", 9, struct.pack("<IQ", 99, 1) + bytes(8))]), "unknown type 99"),
        (build([(b"k", 9, struct.pack("<IQ", 8, 2**60))]), "cut short inside its header"),
        (build([(b"k", 9, struct.pack("<IQ", 6, 2**62))]), "cut short inside its header"),
        (build([(b"k", 8, struct.pack("<Q", 2**63))]), "cut short inside its header"),
        (build([(b"general.alignment", 4, struct.pack("<I", 24))]), "not a power of two"),
        (build([], tensor(b"t", (32,), 77, 0), 1), "t has the unknown type 77"),
        (build([], tensor(b"t", (33,), 2, 0), 1), r"t \[33\] Q4_0 at 0 is no valid entry"),
        (build([], tensor(b"t", (32,), 0, 8), 1), "is no valid entry"),
        (build([], tensor(b"t", (1, 1, 1, 1, 1), 0, 0), 1), "5 dimensions"),
        (build([], tensor(b"t", (1,), 0, 0) * 2, 2) + bytes(128), "t is there twice"),
    ],
)
def test_damaged(tmp_path, data, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message):
        GGUFFile(str(path))


def test_no_such_file(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        GGUFFile(str(tmp_path / "absent.gguf"))


def test_deeply_nested_arrays_do_not_exhaust_the_stack(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(build([(b"k", 9, struct.pack("<IQ", 9, 1) * 100_000)]))
    with pytest.raises(ModelError, match="nested too deep"):
        GGUFFile(str(path))


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K", "IQ4_XS", "IQ2_S", "MXFP4", "TQ1_0", "F64", "I8"])
def test_types_that_cannot_be_read_are_named(tmp_path, kind):
    number = gguf.GGMLQuantizationType[kind]
    _, size = gguf.GGML_QUANT_SIZES[number]
    path = tmp_path / "m.gguf"
    header = build([], tensor(b"t", (256,), int(number), 0), 1)
    path.write_bytes(header + bytes(32 + 256 * size))
    with (
        GGUFFile(str(path)) as file,
        pytest.raises(ModelError, match=f"holds {kind} tensors.*Q4_K_M"),
    ):
        file.refuse_unreadable()


def test_the_type_table_equals_the_gguf_package():
    from headrace.engine.weights.ggml_types import GGML_TYPES

    theirs = {int(k): (k.name, *sizes) for k, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {k: tuple(GGML_TYPES[k]) for k in theirs if k in GGML_TYPES} == {
        k: v for k, v in theirs.items() if k in GGML_TYPES
    }
    assert set(GGML_TYPES) >= {t.value for t in gguf.GGMLQuantizationType if t.value < 36}
