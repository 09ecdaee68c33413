"""Tags over torch's caching allocator or, where sleep is allowed, over the driver's virtual memory.
Contract: headrace.platforms.allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from headrace.platforms.allocator import DeviceAllocator
from headrace.platforms.torch_device.vmm import PIECE, Driver, Region, VmmError

_ALIGNMENT = 512  # bytes, as torch's own allocator


class TorchAllocator(DeviceAllocator):
    """`open_driver` opens the device's virtual memory (VmmError: there is none); None = this platform knows none."""

    def __init__(
        self, device: torch.device, open_driver: Callable[[], Driver] | None = None
    ) -> None:
        self._device = device
        self._open_driver = open_driver
        self._driver: Driver | None = None
        self._awake_because = "memory was taken before sleep was allowed"
        self._held: dict[str, list[torch.Tensor]] = {}
        self._regions: dict[str, list[_SleepingRegion]] = {}
        self._sizes: dict[str, list[int]] = {}  # bytes of each storage that was adopted

    def reserve(self, nbytes: int, tag: str) -> torch.Tensor:
        if self._driver is None:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        else:
            region = self._region(nbytes, tag)
            region.grow(nbytes)
            memory = region.memory[:nbytes].zero_()
        self._held.setdefault(tag, []).append(memory)
        return memory

    def _region(self, nbytes: int, tag: str) -> _SleepingRegion:
        assert self._driver is not None
        region = _SleepingRegion(self._driver, nbytes)
        self._regions.setdefault(tag, []).append(region)
        return region

    def free(self, tag: str) -> None:
        held, regions = self._held.pop(tag, None), self._regions.pop(tag, [])
        self._sizes.pop(tag, None)
        if regions:
            self._synchronize()
        for region in regions:
            region.close()
        if held:
            # back to the device: others may be waiting for it
            self._empty_cache()

    def stats(self) -> dict[str, int]:
        return {tag: sum(part.numel() for part in parts) for tag, parts in self._held.items()}

    # Sleep

    def allow_sleep(self) -> None:
        if self._open_driver is None:
            self._awake_because = super().stays_awake("")
            return
        self._synchronize()  # torch has opened the device for this thread by then
        try:
            driver = self._open_driver()
            _try_out(driver)
        except (VmmError, torch.OutOfMemoryError) as error:
            self._awake_because = f"the driver gives no virtual memory: {error}"
        else:
            self._driver = driver

    def stays_awake(self, tag: str) -> str:
        return self._awake_because if self._driver is None else ""

    def adopt(self, tensors: Iterable[torch.Tensor], tag: str) -> None:
        groups = _by_storage(tensor for tensor in tensors if tensor.device == self._device)
        sizes = [group[0].untyped_storage().nbytes() for group in groups]
        if self._driver is None or not sizes:
            return
        if self._sizes.setdefault(tag, sizes) != sizes:
            raise ValueError(
                f"the {tag} are not of the same sizes as those before, so their addresses cannot be kept"
            )
        need = sum(map(_aligned, sizes))
        region = self._regions[tag][0] if tag in self._regions else self._region(need, tag)
        self._synchronize()  # they may have been filled on other streams
        try:
            with torch.inference_mode():  # some of the tensors may have been made in it
                self._move(groups, region)
        except Exception:
            self._synchronize()
            region.drop()
            raise
        region.woke()
        self._held[tag] = [region.memory[:need]]

    def _move(self, groups: list[list[torch.Tensor]], region: Region) -> None:
        """What tensors leave goes back to the device bit by bit, so that never much more than a piece is there twice.

        The last tensor first: `groups` gives each up in turn.
        """
        offset, target = 0, region.memory.untyped_storage()
        while groups:
            group = groups.pop()
            nbytes = group[0].untyped_storage().nbytes()
            if offset + nbytes > region.mapped:
                self._synchronize()
                self._empty_cache()
                region.grow(offset + nbytes)
            region.memory[offset : offset + nbytes].copy_(_bytes_of(group[0]))
            for tensor in group:
                start = offset // tensor.itemsize + tensor.storage_offset()
                tensor.set_(target, start, tensor.size(), tensor.stride())
            offset += _aligned(nbytes)
        self._synchronize()
        self._empty_cache()

    def sleep(self, tag: str, keep: bool) -> int:
        regions = [region for region in self._regions.get(tag, []) if not region.asleep]
        self._synchronize()
        if keep:
            self._save(regions, tag)
        given = sum(region.fall_asleep() for region in regions)
        self._empty_cache()
        return given

    def _save(self, regions: list[_SleepingRegion], tag: str) -> None:
        need, room = sum(region.mapped for region in regions), host_memory()
        if need > room:
            raise MemoryError(
                f"the host has {room >> 20} MiB free, the copy of the {tag} takes {need >> 20} MiB"
            )
        try:
            for region in regions:
                region.save(pinned=self._device.type != "cpu")
        except RuntimeError as error:  # torch's words when no more can be pinned
            for region in regions:
                region.copies = []
            raise MemoryError(f"the host has no room for the {tag}: {error}") from error
        self._synchronize()

    def wake(self, tag: str) -> None:
        regions = [region for region in self._regions.get(tag, []) if region.asleep]
        self._empty_cache()
        try:
            for region in regions:
                region.grow(region.used)
        except Exception:
            for region in regions:
                region.drop()
            raise
        for region in regions:
            region.restore()
        self._synchronize()
        for region in regions:
            region.woke()
        # torch keeps pinned memory for reuse, and this much of it the host wants back
        getattr(torch._C, "_host_emptyCache", lambda: None)()

    def _synchronize(self) -> None:
        torch.get_device_module(self._device).synchronize(self._device)

    def _empty_cache(self) -> None:
        torch.get_device_module(self._device).empty_cache()


class _SleepingRegion(Region):
    """A region that remembers how much of it is `used`, whether it is `asleep`, and what was kept of it."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        super().__init__(driver, nbytes)
        self.used = nbytes
        self.asleep = False
        self.copies: list[torch.Tensor] = []

    def save(self, pinned: bool) -> None:
        # In powers of two, as large as a piece: torch rounds pinned memory up to the next one.
        for part in self.memory[: self.used].split(PIECE):
            copy = torch.empty(part.numel(), dtype=torch.uint8, pin_memory=pinned)
            self.copies.append(copy)
            copy.copy_(part, non_blocking=True)

    def fall_asleep(self) -> int:
        self.asleep = True
        return self.drop()

    def restore(self) -> None:
        if not self.copies:
            self.memory[: self.used].zero_()
        for part, copy in zip(self.memory[: self.used].split(PIECE), self.copies, strict=False):
            part.copy_(copy, non_blocking=True)

    def woke(self) -> None:
        self.asleep, self.copies = False, []


def _try_out(driver: Driver) -> None:
    """The driver may have every call and yet fail in one. VmmError, torch.OutOfMemoryError."""
    region = Region(driver, 1)
    try:
        for _ in range(2):
            region.grow(1)
            region.drop()
    finally:
        region.close()


def _by_storage(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors that share a storage, together; storages in the order of their first tensors, empty ones left out."""
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.untyped_storage().nbytes():
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    return list(groups.values())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 view of the whole storage behind a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def host_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory that can still be had here: of the system, or of the container if that is less."""
    room = 1 << 62  # not known
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            room = int(line.split()[1]) << 10
    limit = _text(root / "sys/fs/cgroup/memory.max").strip()
    used = _text(root / "sys/fs/cgroup/memory.current").strip()
    return min(room, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else room


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
