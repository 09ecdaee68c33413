"""Where weights come from: ModelFiles (what a model name resolved to) and WeightSource (its tensors, by name).

Names are Hugging Face's ("model.layers.0.self_attn.q_proj.weight") for every source; the GGUF reader maps its own.
Torch-free at import: the API process resolves files and reads specs with this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import msgspec

from headrace.engine.models.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    import torch


class ModelFiles(msgspec.Struct, frozen=True):
    """A model on this disk. Made by `resolve_model` (a folder, a GGUF file, a hub id, "demo")."""

    name: str  # what the user typed
    kind: str  # "safetensors" | "gguf" | "pt" | "dummy"
    root: str  # folder that holds the files
    weights: tuple[str, ...]  # absolute paths; every part of a split file, in order
    config: str = ""  # config.json, "" for GGUF
    tokenizer_root: str = ""  # folder with tokenizer.json / tokenizer.model, or the GGUF file
    generation_config: str = ""
    index: str = ""  # *.index.json


class ModelError(ValueError):
    """The model cannot be used; the text names the file or tensor and says the way out."""


class TensorHandle(Protocol):
    """One stored tensor, read lazily. `scheme` is "float32", "bfloat16", "float16" or a GGUF type such as "Q4_1".

    The rows of a tensor of more than two dimensions are those of the matrix [all rows, last dimension].
    """

    name: str
    shape: tuple[int, ...]
    scheme: str

    def read(
        self, dtype: torch.dtype, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        """The values (dequantized if need be) as a new contiguous CPU tensor; a shard when slices are given."""
        ...

    def read_into(
        self, out: torch.Tensor, rows: slice | None = None, cols: slice | None = None
    ) -> None:
        """The same into `out`, contiguous, in its dtype, on whatever device: what layers load with.

        Complete for work that is enqueued on the current stream afterwards.
        """
        out.copy_(self.read(out.dtype, rows, cols))

    def blocks(self, rows: slice | None = None) -> np.ndarray:
        """Raw quantized rows [rows, bytes a row] without a copy, for kernels that compute on blocks."""
        ...


class WeightSource(Protocol):
    spec: ModelSpec
    files: ModelFiles

    def names(self) -> Iterable[str]: ...

    def get(self, name: str) -> TensorHandle:
        """KeyError when absent."""

    def total_bytes(self) -> int: ...

    def close(self) -> None: ...
