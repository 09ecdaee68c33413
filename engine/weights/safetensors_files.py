"""Safetensors files on disk: headers, shards and their index, checked before anything is loaded. Torch-free.

The format: 8 bytes length, a JSON header {name: {dtype, shape, data_offsets}}, the data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.engine.weights.source import ModelError

_MAX_HEADER = 100_000_000
_SIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
# How the types this engine reads are called elsewhere.
FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    shape: tuple[int, ...]
    dtype: str  # the format's own name: "BF16"
    path: str
    offset: int  # bytes from the start of the file
    nbytes: int


def read_header(path: str) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises ModelError when the file is damaged or shorter than its header says."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= min(size, _MAX_HEADER) else b""
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    try:
        header = json.loads(text)
        entries = {
            name: _entry(path, name, e, 8 + length)
            for name, e in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(
            f"{path} is no complete safetensors file ({_what(path)}); download it again"
        ) from None
    needed = max((t.offset + t.nbytes for t in entries.values()), default=8 + length)
    if size < needed:
        short = [t.name for t in entries.values() if t.offset + t.nbytes > size]
        raise ModelError(
            f"{path} is cut short: it has {size:,} bytes but needs {needed:,} for {', '.join(short)}; download it again"
        )
    return entries


def read_shards(paths: Sequence[str], index: str) -> dict[str, StoredTensor]:
    """The tensors of all files. With an index, every tensor must be in the file that the index names.

    Raises one ModelError with everything that is wrong: damaged files, tensors that are not where they should be.
    """
    problems: list[str] = []
    by_file: dict[str, dict[str, StoredTensor]] = {}
    for path in paths:
        try:
            by_file[os.path.basename(path)] = read_header(path)
        except ModelError as error:
            problems.append(str(error))
    if problems:
        raise ModelError("; ".join(problems))
    tensors: dict[str, StoredTensor] = {}
    for entries in by_file.values():
        tensors.update(entries)
    if not index:
        return tensors
    astray: dict[str, list[str]] = {}
    for name, file in read_index(index).items():
        if name in by_file[file]:
            tensors[name] = by_file[file][name]
        else:
            astray.setdefault(file, []).append(name)
    if astray:
        listing = "; ".join(f"{file} lacks {', '.join(names)}" for file, names in astray.items())
        raise ModelError(
            f"{index} does not fit its files: {listing}; download the index and these files again"
        )
    return tensors


def read_index(path: str) -> dict[str, str]:
    """The `weight_map` of an index file: tensor name -> file name. Raises ModelError."""
    try:
        with open(path, encoding="utf-8") as file:
            weight_map = json.load(file)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(f"{path} is no valid index (no weight_map); download it again") from None
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    if not names or not all(isinstance(n, str) and os.path.basename(n) == n for n in names):
        raise ModelError(f"{path} names no files beside it; download it again")
    return dict(weight_map)


def indexed_files(index: str) -> tuple[str, ...]:
    """Absolute paths of an index's files, in order. Raises ModelError that lists every missing one."""
    folder = os.path.dirname(index)
    names = sorted(set(read_index(index).values()))
    missing = [n for n in names if not os.path.exists(os.path.join(folder, n))]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of the {len(names)} files that {os.path.basename(index)} names: "
            f"{', '.join(missing)}; download them into this folder"
        )
    return tuple(os.path.join(folder, n) for n in names)


def widest_dtype(tensors: Mapping[str, StoredTensor]) -> str:
    """The widest floating type among the tensors: "float32" before "bfloat16" before "float16"; "" when none."""
    kinds = {tensor.dtype for tensor in tensors.values()}
    if kinds & {"F32", "F64"}:
        return "float32"
    if kinds & {"BF16", "F16"}:
        return "float32" if {"BF16", "F16"} <= kinds else FLOATS[(kinds & {"BF16", "F16"}).pop()]
    return ""


def refuse_types(tensors: Mapping[str, StoredTensor]) -> None:
    """ModelError for weights in types that need more than a conversion (fp8, packed integers)."""
    strange = sorted(
        {t.dtype for t in tensors.values() if t.dtype not in FLOATS and len(t.shape) > 1}
    )
    if strange:
        raise ModelError(
            f"this checkpoint holds {', '.join(strange)} weights, which are not supported; use one in float32, "
            "bfloat16 or float16, or a GGUF file"
        )


def _entry(path: str, name: str, entry: Any, data: int) -> StoredTensor:
    """A header entry; `data` is where the file's data begins. ValueError and its like when it contradicts itself."""
    dtype, (begin, end) = str(entry["dtype"]), entry["data_offsets"]
    shape = tuple(int(n) for n in entry["shape"])
    size = _SIZES.get(dtype)
    if not 0 <= begin <= end or min(shape, default=0) < 0:
        raise ValueError(name)
    if size and end - begin != math.prod(shape) * size:
        raise ValueError(name)
    return StoredTensor(name, shape, dtype, path, data + begin, end - begin)


def _what(path: str) -> str:
    with open(path, "rb") as file:
        start = file.read(8)
    if start == b"version ":
        return "it is a Git LFS pointer; `git lfs pull` gets the file"
    return "its header is damaged" if start else "it is empty"
