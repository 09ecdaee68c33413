"""What a path on this disk holds: a GGUF file, or a folder with a checkpoint. Torch-free, never asks the network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from headrace.engine.weights.gguf import GGUFPart, part_paths
from headrace.engine.weights.safetensors_files import indexed_files
from headrace.engine.weights.source import ModelError, ModelFiles

LOAD_FORMATS = ("auto", "safetensors", "gguf", "pt", "dummy")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# The name of a part: "-00001-of-00003"
_NUMBERED = re.compile(r"-(\d{5})-of-(\d{5})$")
# Files in a model's folder that hold something else than the model.
_NOT_THE_MODEL = re.compile(r"^(mmproj|consolidated|adapter_|training_args|optimizer|scheduler)")


class NoWeights(ModelError):
    """A folder without any file of weights."""


def files_at(name: str, path: Path, load_format: str = "auto") -> ModelFiles:
    """The model at `path` (which exists). `name` is what the user typed. Raises ModelError.

    In a folder, "auto" takes safetensors before PyTorch files before GGUF.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelError(
            f"load format {load_format} is unknown; use one of {', '.join(LOAD_FORMATS)}"
        )
    if path.is_dir():
        return _folder(name, path.absolute(), load_format)
    if path.suffix.lower() in (".safetensors", ".bin", ".pt", ".json"):
        raise ModelError(f"{path} is one file of a model; give its folder, {path.parent}")
    if load_format not in ("auto", "gguf"):
        raise ModelError(
            f"{path} is read as GGUF, but load format {load_format} was asked for; leave it out, or give a folder"
        )
    return gguf_files(name, path.absolute())


def gguf_files(name: str, path: Path) -> ModelFiles:
    """One GGUF file or the parts of a split one, `path` being the first. Only the first header is read."""
    first = GGUFPart(str(path))
    try:
        parts = part_paths(str(path), first.metadata)
    finally:
        first.close()
    return ModelFiles(
        name=name,
        kind="gguf",
        root=str(path.parent),
        weights=tuple(parts),
        tokenizer_root=str(path),
    )


def tokenizer_at(path: Path) -> str:
    """The folder or GGUF file at `path` as `tokenizer_root`. ModelError when there is no tokenizer in it."""
    if path.is_file():
        return str(path.parent if path.name in TOKENIZER_FILES else path)
    if not any((path / n).exists() for n in TOKENIZER_FILES):
        raise ModelError(f"{path} has no tokenizer; it needs {' or '.join(TOKENIZER_FILES[:2])}")
    return str(path)


def gguf_choices(paths: Sequence[str]) -> list[str]:
    """The models among GGUF files: a split one is there once, by its first part; vision parts are left out."""
    chosen = []
    for path in sorted(paths):
        stem = Path(path).stem
        part = _NUMBERED.search(stem)
        if not _NOT_THE_MODEL.match(Path(path).name) and (part is None or int(part[1]) == 1):
            chosen.append(path)
    return chosen


def _folder(name: str, root: Path, load_format: str) -> ModelFiles:
    if load_format == "dummy":
        return _checkpoint(name, root, "dummy", (), "")
    for kind, suffix, single in (
        ("safetensors", "safetensors", "model"),
        ("pt", "bin", "pytorch_model"),
    ):
        if load_format in ("auto", kind):
            weights, index = _plain_weights(root, suffix, single)
            if weights:
                return _checkpoint(name, root, kind, weights, index)
    if load_format in ("auto", "gguf"):
        found = _ggufs(root)
        if found:
            return gguf_files(name, found)
    wanted = "*.safetensors, pytorch_model.bin or *.gguf" if load_format == "auto" else load_format
    raise NoWeights(f"{root} holds no weights ({wanted}); give the folder or file of a model")


def _checkpoint(
    name: str, root: Path, kind: str, weights: tuple[str, ...], index: str
) -> ModelFiles:
    config = root / "config.json"
    if not config.exists():
        raise ModelError(
            f"{root} has no config.json; get it from the model's page, or use a GGUF file"
        )
    generation = root / "generation_config.json"
    return ModelFiles(
        name=name,
        kind=kind,
        root=str(root),
        weights=weights,
        config=str(config),
        tokenizer_root=str(root),
        generation_config=str(generation) if generation.exists() else "",
        index=index,
    )


def _ggufs(root: Path) -> Path | None:
    every = [str(p) for p in root.glob("*.gguf")]
    found = gguf_choices(every)
    if len(found) > 1:
        names = ", ".join(Path(p).name for p in found)
        raise ModelError(
            f"{root} holds several GGUF models; give one of them as the model: {names}"
        )
    if not found and every:  # parts without their first, or vision parts alone
        return Path(min(every))
    return Path(found[0]) if found else None


def _plain_weights(root: Path, suffix: str, single: str) -> tuple[tuple[str, ...], str]:
    """The weight files of one kind and their index ("" when there is none); nothing when the folder has none."""
    index = root / f"{single}.{suffix}.index.json"
    if index.exists():
        return indexed_files(str(index)), str(index)
    usual = root / f"{single}.{suffix}"
    if usual.exists():
        return (str(usual),), ""
    found = sorted(p for p in root.glob(f"*.{suffix}") if not _NOT_THE_MODEL.match(p.name))
    if not found:
        return (), ""
    if len(found) > 1 or _NUMBERED.search(found[0].stem):
        _refuse_incomplete(root, found, index.name)
    return tuple(str(p) for p in found), ""


def _refuse_incomplete(root: Path, found: list[Path], index: str) -> None:
    """Several files without an index are one model only if they are all parts of one numbered set."""
    marks = [_NUMBERED.search(p.stem) for p in found]
    stems = {p.stem[: m.start()] for p, m in zip(found, marks, strict=True) if m}
    counts = {int(m[2]) for m in marks if m}
    if not all(marks) or len(stems) != 1 or len(counts) != 1:
        raise ModelError(
            f"{root} holds several weight files ({', '.join(p.name for p in found)}) and no {index} "
            "that says how they belong together; download the index"
        )
    there = {int(m[1]) for m in marks if m}
    count, stem, suffix = counts.pop(), stems.pop(), found[0].suffix
    missing = [
        f"{stem}-{i:05d}-of-{count:05d}{suffix}" for i in range(1, count + 1) if i not in there
    ]
    if missing:
        raise ModelError(f"{root} lacks {', '.join(missing)}; download them into this folder")
