"""Tagged device memory: weights and KV are reserved under tags so that a later `sleep` can free either."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class DeviceAllocator(ABC):
    @abstractmethod
    def reserve(self, nbytes: int, tag: str) -> torch.Tensor:
        """uint8 [nbytes] of zeros; a CPU commits its pages only as they are written.

        Zeros, because a masked sum over keys never written must stay finite: 0 * NaN is NaN.
        """

    @abstractmethod
    def free(self, tag: str) -> None:
        """Give back everything reserved under the tag. The caller has dropped its own views."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Bytes reserved for each tag."""
