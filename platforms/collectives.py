"""Collective operations over one group of workers. The host control plane is the engine's own pipes, not these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Who takes part. `init_method` is a rendezvous on this host, e.g. "file:///..."."""

    rank: int
    world: int
    init_method: str
    same_node: bool = True


class Collectives(ABC):
    capture_safe: ClassVar[bool] = False  # may be called inside a graph capture

    rank: int
    world: int

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the group; may reuse x's memory. Any shape and float dtype."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate every rank's x (equal shapes) along dim, in rank order."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor: ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class SoloCollectives(Collectives):
    """A group of one: everything is the identity."""

    capture_safe = True
    rank = 0
    world = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        return x

    def barrier(self) -> None:
        return None

    def close(self) -> None:
        return None
