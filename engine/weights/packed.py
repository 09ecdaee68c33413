"""Where packed weights are kept between starts, and what they are kept for. Torch-free."""

from __future__ import annotations

import hashlib
from pathlib import Path

from headrace.engine.config import env
from headrace.engine.weights.source import ModelFiles


def packed_folder() -> Path:
    return env.cache_dir() / "packed"


def packed_file(files: ModelFiles, rank: int, world: int) -> Path:
    """One file for each model and rank: a model that changed takes its old one's place."""
    name = repr((files.weights, rank, world)).encode()
    return packed_folder() / f"{hashlib.blake2b(name, digest_size=12).hexdigest()}.packed"


def identity(files: ModelFiles) -> str:
    """Changes when any of the model's files does: path, size and time of the last change of each."""
    paths = [*files.weights, *filter(None, (files.config,))]
    seen = [(path, Path(path).stat()) for path in paths]
    facts = [(path, at.st_size, at.st_mtime_ns) for path, at in seen]
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def packed_size() -> tuple[int, int]:
    """Files that are kept, and their bytes."""
    sizes = [path.stat().st_size for path in packed_folder().glob("*.packed")]
    return len(sizes), sum(sizes)
