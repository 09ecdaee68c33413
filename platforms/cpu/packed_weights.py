"""Packed matrices kept in a file, so that a second start maps them instead of reading and packing the model again.

The file: magic, length and digest of the header, the header (JSON: the identity that it was made for; of each matrix
its place, size and checksum), then the matrices, each at a multiple of a page. It is written aside and renamed, so it
is there whole or not at all. Whatever does not fit (another identity, a wrong checksum, a cut file) counts as absent
and is written anew when the model has been loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)

SUFFIX = ".packed"
_MAGIC = b"headrace"
_PAGE = 4096
_START = struct.Struct("<8sQ16s")  # magic, bytes of the header, its digest


class PackedWeights:
    """One model's matrices by name. `checksum` is a fast 64-bit sum of an array's bytes."""

    def __init__(self, path: Path, identity: str, checksum: Callable[[np.ndarray], int]) -> None:
        self.path = path
        self._identity = identity
        self._checksum = checksum
        self._lock = threading.Lock()  # weights are loaded by several threads
        self._held: dict[str, np.ndarray] = {}  # what the file should hold
        self._new = False
        self._entries, self._data = self._open()

    def find(self, name: str, nbytes: int) -> np.ndarray | None:
        """uint8 [nbytes] in the mapped file, or None."""
        place = self._entries.get(name)
        if place is None or place[1] != nbytes or place[0] + nbytes > len(self._data):
            return None
        found = np.frombuffer(self._data, np.uint8, nbytes, place[0])
        if self._checksum(found) != place[2]:
            log.warning("%s: %s is damaged; it is packed again", self.path, name)
            return None
        with self._lock:
            self._held[name] = found
        return found

    def add(self, name: str, packed: np.ndarray) -> None:
        with self._lock:
            self._held[name] = packed
            self._new = True

    def save(self) -> None:
        """Write the file if anything in it is new. A disk that does not take it is no reason not to serve."""
        if not self._new:
            return
        aside = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            need = sum(data.nbytes + _PAGE for data in self._held.values())
            free = shutil.disk_usage(self.path.parent).free
            if free < 2 * need:
                log.warning(
                    "packed weights are not kept: they take %d MB, and of the disk of %s %d MB are free",
                    need >> 20, self.path.parent, free >> 20,
                )  # fmt: skip
                return
            self._write(aside)
            aside.replace(self.path)
        except OSError as error:
            log.warning("packed weights are not kept: %s", error)
        finally:
            with suppress(OSError):
                aside.unlink()

    def _write(self, aside: Path) -> None:
        with aside.open("wb") as file:
            # sizes first, with places of the same length as the final ones
            header = self._header(1 << 62)
            start = -(-(_START.size + len(header)) // _PAGE) * _PAGE
            header = self._header(start).ljust(len(header))
            file.write(_START.pack(_MAGIC, len(header), _digest(header)))
            file.write(header)
            for data in self._held.values():
                file.seek(-(-file.tell() // _PAGE) * _PAGE)
                file.write(data.data)
            file.flush()
            os.fsync(file.fileno())

    def _header(self, start: int) -> bytes:
        entries, at = {}, start
        for name, data in self._held.items():
            at = -(-at // _PAGE) * _PAGE
            entries[name] = (at, data.nbytes, self._checksum(data))
            at += data.nbytes
        return json.dumps({"identity": self._identity, "entries": entries}).encode()

    def _open(self) -> tuple[dict[str, tuple[int, int, int]], mmap.mmap | bytes]:
        """The entries of a file that was made for this identity, and its bytes."""
        try:
            with self.path.open("rb") as file:
                data = mmap.mmap(
                    file.fileno(), 0, access=mmap.ACCESS_COPY
                )  # torch wants writable memory
        except (OSError, ValueError):  # none, or empty
            return {}, b""
        try:
            magic, size, digest = _START.unpack_from(data)
            header = data[_START.size : _START.size + size]
            if magic != _MAGIC or _digest(header) != digest:
                raise ValueError("its header is damaged")
            content = json.loads(header)
            if content["identity"] != self._identity:
                raise ValueError("it was made for another file or another build")
        except (struct.error, ValueError) as error:
            log.info("%s is written anew: %s", self.path, error)
            return {}, b""
        return {name: tuple(place) for name, place in content["entries"].items()}, data


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
