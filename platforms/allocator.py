"""Tagged device memory: weights and KV are taken under tags so that `sleep` can give back either."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class DeviceAllocator(ABC):
    """A tag sleeps when its memory is given back to the device while its addresses stay: graphs and tensors that
    have them are valid again when it wakes. Whoever lets a tag sleep has waited for the device to be done with it.
    """

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

    def allow_sleep(self) -> None:
        """From here on take memory so that it can be given back while its addresses stay, where that is possible."""
        return None

    def stays_awake(self, tag: str) -> str:
        """Why this tag cannot sleep, to follow "because"; "" = it can."""
        return "this device cannot give memory back and keep its addresses"

    def adopt(self, tensors: Iterable[torch.Tensor], tag: str) -> None:
        """Move what the tensors on this device hold into memory of the tag; they stay the same objects.

        The second time, tensors of the same sizes in the same order come to the addresses of the first ones, which
        are overwritten; a tag that slept is awake then. ValueError when they are not the same. torch.OutOfMemoryError.
        Nothing happens where the tag cannot sleep.
        """
        return None

    def sleep(self, tag: str, keep: bool) -> int:
        """Give the memory of a tag that is awake back, with `keep` after a copy to the host; the bytes given back.

        MemoryError when the host has no room for the copy: nothing has changed then.
        """
        return 0

    def wake(self, tag: str) -> None:
        """Take memory again, with what was in it if that was kept, else zeros. A failure (torch.OutOfMemoryError)
        leaves the tag asleep."""
        return None
