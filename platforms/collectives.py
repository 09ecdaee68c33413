"""Collective operations over one group of workers. The host control plane is the engine's own pipes, not these.

Their implementations are selected like those of an op, under the name OP, by a GroupQuery; what a row names is called
as `cls(group, runtime)` on every rank at once. headrace.platforms.groups chooses and tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

OP = "collectives"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Who takes part. `init_method` is a rendezvous on this host, e.g. "file:///..."."""

    rank: int
    world: int
    init_method: str
    same_node: bool = True


class Collectives(ABC):
    """When one is made, torch.distributed's default group holds the ranks' processes and talks through their hosts."""

    capture_safe: bool = False  # may be called inside a graph capture

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
    def close(self) -> None:
        """What it made itself; the default group stays."""


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
