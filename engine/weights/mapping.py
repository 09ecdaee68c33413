"""Files mapped into memory. Torch-free."""

from __future__ import annotations

import contextlib
import mmap

from headrace.engine.weights.source import ModelError


def map_file(path: str) -> mmap.mmap:
    """The whole file, read only. ModelError when it is absent, empty or unreadable."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; give the path of a model") from None
    except ValueError:
        raise ModelError(f"{path} is empty; download it again") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


def release(data: mmap.mmap, start: int, stop: int) -> None:
    """Takes the bytes start to stop out of this process's memory.

    The system keeps them cached, and reading them again brings them back. Without this, loading would count the
    model twice: as tensors and as the file they came from.
    """
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if stop > first:
        data.madvise(mmap.MADV_DONTNEED, first, stop - first)


def unmap(data: mmap.mmap) -> None:
    """Closes the map; while an array still looks at it, it goes with the last of them."""
    with contextlib.suppress(BufferError):
        data.close()
