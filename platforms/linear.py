"""Contracts of the ops that own a packed weight: linear layers and embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import EmbeddingQuery, LinearQuery

if TYPE_CHECKING:
    import torch


class LinearImpl(ABC):
    """One linear layer's kernel and the weight layout it wants."""

    # Implementations of "linear" and "embedding" with equal names here make equal packed weights of equal matrices,
    # so a table that serves as both is packed once.
    packing: ClassVar[str] = ""

    def __init__(self, query: LinearQuery, runtime: DeviceRuntime) -> None:
        self.query = query
        self.runtime = runtime

    @abstractmethod
    def pack(self, weight: Any, bias: torch.Tensor | None) -> Any:
        """Once after load: w [out, in] (a tensor, or raw blocks for a quantized scheme) -> the kernel's own layout."""

    @abstractmethod
    def __call__(
        self, x: torch.Tensor, packed: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, in] -> [T, out] in the query's out_dtype (or dtype); into `out`, a view with unit column stride, if
        given."""

    def empty(self, rows: int, features: int) -> torch.Tensor:
        """Memory for the results of several linears side by side."""
        import torch

        dtype = getattr(torch, self.query.out_dtype or self.query.dtype)
        return torch.empty(rows, features, dtype=dtype, device=self.runtime.device)


class EmbeddingImpl(ABC):
    """Rows of a table by token id, times the query's scale."""

    packing: ClassVar[str] = ""  # see LinearImpl

    def __init__(self, query: EmbeddingQuery, runtime: DeviceRuntime) -> None:
        self.query = query
        self.runtime = runtime

    @abstractmethod
    def pack(self, weight: Any) -> Any:
        """Once after load: w [vocab, hidden] -> the kernel's own layout."""

    @abstractmethod
    def __call__(self, ids: torch.Tensor, packed: Any) -> torch.Tensor:
        """ids [T] int32 or int64, each within [0, vocab) -> [T, hidden] in the query's dtype."""
