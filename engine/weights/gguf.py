"""GGUF files: header, metadata and the place of every tensor. Torch-free, numpy-free.

Why an own reader: the `gguf` package's GGUFReader makes several numpy objects for each token, which takes seconds for
a vocabulary of 262,144 (Gemma 3 on a 2-core machine: 8.4 s, against 0.02 s here and 0.1 s more for the token strings),
and a start reads the header twice (the API process needs the tokenizer, the engine process the weights). Here arrays
are walked over once and decoded only when they are asked for.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.engine.weights.ggml_types import GGML_TYPES, READABLE, GGMLType
from headrace.engine.weights.mapping import map_file, unmap
from headrace.engine.weights.source import ModelError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# value type -> struct code of its scalars
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_MAX_DIMS = 4
_MAX_NESTING = 8
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_PART = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Array:
    """An array that was walked over: where its first element lies, and how many there are."""

    kind: int
    count: int
    start: int


class GGUFMetadata(Mapping[str, Any]):
    """Keys and values of a header. Scalars are decoded already; an array is decoded at each access, so keep it.

    Arrays come as lists of int, float, bool or str. Strings that are not UTF-8 get U+FFFD in place of the bad bytes;
    `raw_strings` has the bytes.
    """

    def __init__(self, data: mmap.mmap, values: dict[str, Any]):
        self._data = data
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return _decode_array(self._data, value)[0] if isinstance(value, _Array) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def array_length(self, key: str) -> int:
        """Elements of the array `key` without decoding it; 0 when it is absent or no array."""
        value = self._values.get(key)
        return value.count if isinstance(value, _Array) else 0

    def raw_strings(self, key: str) -> list[bytes]:
        """The array of strings `key` as bytes. KeyError when absent, TypeError when it holds something else."""
        value = self._values[key]
        if not isinstance(value, _Array) or value.kind != _STRING:
            raise TypeError(f"{key} is no array of strings")
        return _strings(self._data, value)[0]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]  # row-major: the last dimension is the one blocks run along
    type: GGMLType
    part: int  # index of the file that holds it
    offset: int  # bytes from the start of that file
    nbytes: int


class GGUFPart:
    """One mapped file. Raises ModelError when it is no GGUF file or its header is damaged."""

    def __init__(self, path: str, index: int = 0):
        self.path = path
        self.name = os.path.basename(path)
        self.data = map_file(path)
        try:
            self._parse(index)
        except (struct.error, IndexError, OverflowError):
            raise ModelError(f"{path} is cut short inside its header; download it again") from None

    def _parse(self, index: int) -> None:
        data = self.data
        _check_magic(self.path, data)
        tensor_count, key_count = struct.unpack_from("<QQ", data, 8)
        values: dict[str, Any] = {}
        pos = 24
        for _ in range(key_count):
            key, pos = _read_string(data, pos)
            (kind,) = _U32.unpack_from(data, pos)
            values[key], pos = _read_value(self.path, data, kind, pos + 4)
        self.metadata = GGUFMetadata(data, values)
        entries = []
        for _ in range(tensor_count):
            name, pos = _read_string(data, pos)
            (dims,) = _U32.unpack_from(data, pos)
            if dims > _MAX_DIMS:
                raise ModelError(f"{self.path}: {name} has {dims} dimensions; the file is damaged")
            *shape, kind, offset = struct.unpack_from(f"<{dims}QIQ", data, pos + 4)
            pos += 16 + 8 * dims
            entries.append((name, tuple(reversed(shape)), kind, offset))
        alignment = self.alignment()
        self.data_start = -(-pos // alignment) * alignment
        self.tensors = [self._place(index, alignment, *entry) for entry in entries]
        self.data_end = max((t.offset + t.nbytes for t in self.tensors), default=self.data_start)

    def alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or value < 1 or value & (value - 1):
            raise ModelError(
                f"{self.path}: general.alignment is {value!r}, not a power of two; the file is damaged"
            )
        return value

    def _place(
        self, index: int, alignment: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> GGUFTensor:
        ggml = GGML_TYPES.get(kind)
        if ggml is None:
            raise ModelError(
                f"{self.path}: {name} has the unknown type {kind}; use a file with types among "
                + ", ".join(READABLE)
            )
        width = shape[-1] if shape else 1
        count = 1
        for size in shape:
            count *= size
        if width % ggml.block or offset % alignment or count == 0:
            raise ModelError(
                f"{self.path}: {name} {list(shape)} {ggml.name} at {offset} is no valid entry; "
                "the file is damaged, download it again"
            )
        return GGUFTensor(
            name, shape, ggml, index, self.data_start + offset, count // ggml.block * ggml.size
        )

    def close(self) -> None:
        unmap(self.data)


class GGUFFile:
    """A model in one GGUF file or in all parts of a split one.

    Raises ModelError, in one sentence that says what to do, for: another part than the first, a missing part, parts
    joined by `cat`, tensors that lie beyond the end of the file (all named), the same tensor twice.
    """

    def __init__(self, path: str):
        self.parts = [GGUFPart(path)]
        first = self.parts[0]
        self.metadata = first.metadata
        try:
            _refuse_joined(first)
            for number, name in enumerate(part_paths(path, first.metadata)[1:], start=1):
                self.parts.append(_open_part(name, number, first))
            self.tensors = _collect(self.parts)
        except ModelError:
            self.close()
            raise

    def rows(self, tensor: GGUFTensor) -> memoryview:
        """The stored bytes of a tensor, not copied."""
        view = memoryview(self.parts[tensor.part].data)
        return view[tensor.offset : tensor.offset + tensor.nbytes]

    def refuse_unreadable(self) -> None:
        """ModelError that lists every tensor type this engine cannot read."""
        kinds = sorted({t.type.name for t in self.tensors.values()} - set(READABLE))
        if kinds:
            raise ModelError(
                f"{self.parts[0].path} holds {', '.join(kinds)} tensors, which are not supported; "
                f"use a file whose types are among {', '.join(READABLE)} (for example a Q4_K_M or Q8_0 file)"
            )

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def part_paths(path: str, metadata: Mapping[str, Any]) -> list[str]:
    """Every part of the model whose part `path` has this metadata, in order; [path] when it is not split.

    Raises ModelError when `path` is not the first part, is not named as one, or a part is not there.
    """
    count, number = _integer(metadata, "split.count"), _integer(metadata, "split.no")
    if count <= 1:
        return [path]
    folder, name = os.path.split(path)
    match = _PART.match(name)
    if match is None or int(match["count"]) != count or int(match["part"]) != number + 1:
        raise ModelError(
            f"{path} is part {number + 1} of {count} of a split model, but is not named so; "
            f"name the parts MODEL-00001-of-{count:05d}.gguf and so on, and give the first"
        )
    names = [
        os.path.join(folder, f"{match['stem']}-{i:05d}-of-{count:05d}.gguf")
        for i in range(1, count + 1)
    ]
    if number:
        raise ModelError(f"{path} is part {number + 1} of {count}; give the first one: {names[0]}")
    missing = [os.path.basename(n) for n in names if not os.path.exists(n)]
    if missing:
        raise ModelError(
            f"{path} is the first of {count} parts, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing beside it; download all parts into one folder"
        )
    return names


def _open_part(path: str, number: int, first: GGUFPart) -> GGUFPart:
    part = GGUFPart(path, number)
    _refuse_joined(part)
    if _integer(part.metadata, "split.no") != number or _integer(
        part.metadata, "split.count"
    ) != _integer(first.metadata, "split.count"):
        raise ModelError(
            f"{path} is named part {number + 1} but says it is part "
            f"{_integer(part.metadata, 'split.no') + 1}; download it again"
        )
    return part


def _collect(parts: list[GGUFPart]) -> dict[str, GGUFTensor]:
    """All tensors by name, checked against the files' sizes and the split's own count."""
    tensors: dict[str, GGUFTensor] = {}
    for part in parts:
        short = [t.name for t in part.tensors if t.offset + t.nbytes > len(part.data)]
        if short:
            raise ModelError(
                f"{part.path} is cut short: it has {len(part.data):,} bytes but needs {part.data_end:,} "
                f"for {', '.join(short)}; download it again"
            )
        for tensor in part.tensors:
            if tensor.name in tensors:
                raise ModelError(f"{part.path}: {tensor.name} is there twice; download it again")
            tensors[tensor.name] = tensor
    expected = _integer(parts[0].metadata, "split.tensors.count")
    if expected and expected != len(tensors):
        raise ModelError(
            f"{parts[0].path} and its parts hold {len(tensors)} tensors, but the model has {expected}; "
            "the parts belong to different models or conversions, download them again"
        )
    return tensors


def _refuse_joined(part: GGUFPart) -> None:
    """Split parts joined by `cat` look like their first part with something behind it: another header."""
    end = part.data_end
    aligned = -(-end // part.alignment()) * part.alignment()
    if any(part.data[at : at + 4] == MAGIC for at in {end, aligned}):
        raise ModelError(
            f"{part.path} is several GGUF files joined one behind the other; give the first part with the other "
            "parts beside it as they were downloaded, or join them with `llama-gguf-split --merge`"
        )


def _check_magic(path: str, data: mmap.mmap) -> None:
    magic = data[:4]
    if magic != MAGIC:
        if data[:8] == b"version ":
            raise ModelError(f"{path} is a Git LFS pointer, not the model; run `git lfs pull`")
        if magic in (b"tjgg", b"lmgg", b"fmgg"):
            raise ModelError(f"{path} is in the old GGML format; use a GGUF file of the model")
        raise ModelError(
            f"{path} is no GGUF file (it begins with {magic!r}); if it is one piece of a file cut by `split`, "
            "join the pieces with `cat`, else download it again"
        )
    (version,) = _U32.unpack_from(data, 4)
    if version & 0xFFFF == 0:
        raise ModelError(f"{path} is a big-endian GGUF file; use the little-endian one")
    if version not in (2, 3):
        raise ModelError(
            f"{path} is GGUF version {version}; versions 2 and 3 are supported, convert the model again"
        )


def _read_string(data: mmap.mmap, pos: int) -> tuple[str, int]:
    (length,) = _U64.unpack_from(data, pos)
    pos += 8
    if pos + length > len(data):
        raise IndexError
    return data[pos : pos + length].decode("utf-8", "replace"), pos + length


def _read_value(path: str, data: mmap.mmap, kind: int, pos: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _read_string(data, pos)
    if kind == _ARRAY:
        return _walk_array(path, data, pos, 0)
    code = _SCALARS.get(kind)
    if code is None:
        raise ModelError(f"{path} has metadata of the unknown type {kind}; the file is damaged")
    return struct.unpack_from("<" + code, data, pos)[0], pos + struct.calcsize(code)


def _walk_array(path: str, data: mmap.mmap, pos: int, depth: int) -> tuple[_Array, int]:
    """Finds the end of an array without decoding it."""
    kind, count = struct.unpack_from("<IQ", data, pos)
    pos += 12
    array = _Array(kind, count, pos)
    if kind == _STRING:
        read = _U64.unpack_from
        for _ in range(count):
            pos += 8 + read(data, pos)[0]
    elif kind == _ARRAY:
        if depth == _MAX_NESTING:
            raise ModelError(f"{path} has arrays nested too deep; the file is damaged")
        for _ in range(count):
            pos = _walk_array(path, data, pos, depth + 1)[1]
    elif kind in _SCALARS:
        pos += count * struct.calcsize(_SCALARS[kind])
    else:
        raise ModelError(f"{path} has an array of the unknown type {kind}; the file is damaged")
    if pos > len(data):
        raise IndexError
    return array, pos


def _decode_array(data: mmap.mmap, array: _Array) -> tuple[list[Any], int]:
    """The elements, and where the array ends."""
    if array.kind == _STRING:
        raw, pos = _strings(data, array)
        return [item.decode("utf-8", "replace") for item in raw], pos
    pos = array.start
    if array.kind == _ARRAY:
        items = []
        for _ in range(array.count):
            kind, count = struct.unpack_from("<IQ", data, pos)
            item, pos = _decode_array(data, _Array(kind, count, pos + 12))
            items.append(item)
        return items, pos
    layout = struct.Struct(f"<{array.count}{_SCALARS[array.kind]}")
    return list(layout.unpack_from(data, pos)), pos + layout.size


def _strings(data: mmap.mmap, array: _Array) -> tuple[list[bytes], int]:
    pos, read, items = array.start, _U64.unpack_from, []
    for _ in range(array.count):
        start = pos + 8
        pos = start + read(data, pos)[0]
        items.append(data[start:pos])
    return items, pos


def _integer(metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(key, 0)
    return value if isinstance(value, int) else 0
