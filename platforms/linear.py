"""Contracts of the ops that own a packed weight: linear layers, embeddings, experts.

A packed value keeps tensors, not addresses within them: where memory can sleep they move once after they are packed
(DeviceAllocator.adopt).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import EmbeddingQuery, ExpertsQuery, LinearQuery

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm. Conventions: the op "fused_add_rms_norm"."""

    weight: torch.Tensor  # [in] float32
    eps: float


class LinearImpl(ABC):
    """One linear layer's kernel and the weight layout it wants."""

    # Implementations of "linear" and "embedding" with equal names here make equal packed weights of equal matrices,
    # so a table that serves as both is packed once.
    packing: ClassVar[str] = ""
    # Up to so many rows of x `gated` is faster than the linear and the activation one after the other; 0 = never.
    gated_rows: ClassVar[int] = 0
    # Up to so many rows of x `normed` is faster than the norm and what follows it one after the other; 0 = never.
    normed_rows: int = 0

    def __init__(self, query: LinearQuery, runtime: DeviceRuntime) -> None:
        self.query = query
        self.runtime = runtime

    @abstractmethod
    def pack(self, weight: Any, bias: torch.Tensor | None) -> Any:
        """Once after load: w [out, in] -> the kernel's own layout.

        A tensor, or for a quantized scheme the stored rows, uint8 [out, bytes of a row]. Where these have an attribute
        `drop`, `drop(first, stop)` says which rows will not be read again, so that they need no memory meanwhile.
        """

    def pack_named(self, name: str, weight: Callable[[], Any], bias: torch.Tensor | None) -> Any:
        """`pack` of what `weight` reads, or what came of the matrix of this name at an earlier start where the device
        keeps packed weights (DeviceRuntime.packed_weights)."""
        return self.pack(weight(), bias)

    @abstractmethod
    def __call__(
        self, x: torch.Tensor, packed: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, in] -> [T, out] in the query's out_dtype (or dtype); into `out`, a view with unit column stride, if
        given."""

    def gated(self, x: torch.Tensor, packed: Any, activation: str) -> torch.Tensor:
        """act(y[:, :out / 2]) * y[:, out / 2:] of y = self(x, packed), [T, out / 2]; y itself need not be rounded.

        `activation`: "silu" | "gelu_tanh" | "gelu". For T up to `gated_rows`.
        """
        raise NotImplementedError

    def normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm,
        packed: Any,
        activation: str = "",
        keep: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(self(n, packed), or `gated` with an activation; the sum s = x + residual; with `keep` n) of n = norm(s).

        x, residual [T, in], which are not changed; s and n are rounded to their dtype. For T up to `normed_rows`.
        """
        raise NotImplementedError

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

    def pack_named(self, name: str, weight: Callable[[], Any]) -> Any:
        """See LinearImpl."""
        return self.pack(weight())

    @abstractmethod
    def __call__(self, ids: torch.Tensor, packed: Any) -> torch.Tensor:
        """ids [T] int32 or int64, each within [0, vocab) -> [T, hidden] in the query's dtype."""


class ExpertsImpl(ABC):
    """All experts of one layer: y[t] = sum over k of weights[t, k] * expert ids[t, k] of x[t].

    An expert is down(act(gate(x)) * up(x)), with the query's activation. What lies between the two products is rounded
    to the query's dtype at most once; the sum over k is taken in float32, in an order that does not depend on the
    other tokens.
    """

    def __init__(self, query: ExpertsQuery, runtime: DeviceRuntime) -> None:
        self.query = query
        self.runtime = runtime

    @abstractmethod
    def pack(self, w13: Any, w2: Any) -> Any:
        """Once after load -> the kernel's own layout. w13 [E, 2 * I, H] (gate's rows, then up's), w2 [E, H, I].

        Tensors on the device; for a quantized scheme a sequence of E arrays of raw blocks [rows, bytes a row], each
        read from the file when it is asked for. An implementation may keep the tensors it is given.
        """

    def pack_named(self, name: str, w13: Callable[[], Any], w2: Callable[[], Any]) -> Any:
        """See LinearImpl."""
        return self.pack(w13(), w2())

    @abstractmethod
    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Any
    ) -> torch.Tensor:
        """x [T, H], weights [T, K] float32, ids [T, K] int32 within [0, E), unlike in a row -> [T, H] in the query's
        dtype."""
