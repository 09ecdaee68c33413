"""Pages of reserved memory are there before they are written, as far ahead as was promised and no further."""

from __future__ import annotations

import ctypes
import mmap
import time

import numpy as np
import pytest

from headrace.platforms.cpu.pages import AHEAD, MADVISE, POPULATE_WRITE
from headrace.platforms.cpu.runtime import CpuAllocator

HUGE = 2 << 20


def served() -> bool:
    """Whether the system takes pages on request (Linux 5.14)."""
    if MADVISE is None:
        return False
    page = mmap.mmap(-1, mmap.PAGESIZE)
    return (
        MADVISE(ctypes.addressof(ctypes.c_char.from_buffer(page)), mmap.PAGESIZE, POPULATE_WRITE)
        == 0
    )


pytestmark = pytest.mark.skipif(not served(), reason="the system takes no pages on request")


def resident(address: int, nbytes: int) -> int:
    """Bytes of this memory that have pages."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    count = (address + nbytes - start + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    flags = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(count * mmap.PAGESIZE), flags) == 0
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


def comes(address: int, nbytes: int, wanted: int) -> int:
    """The bytes that are there once at least `wanted` are, or after ten seconds."""
    until = time.monotonic() + 10
    while (found := resident(address, nbytes)) < wanted and time.monotonic() < until:
        time.sleep(0.01)
    return found


@pytest.fixture
def memory(monkeypatch):
    """Fresh from the system: what the C library has at hand may have pages from its last use."""
    allocator, private = CpuAllocator(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

    def fresh(size, dtype):
        return np.frombuffer(mmap.mmap(-1, size, flags=private), dtype)

    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", fresh)
        reserved = allocator.reserve(16 * AHEAD, "kv_cache")
    yield allocator, reserved
    allocator.pages.close()


def test_a_little_is_there_from_the_start(memory):
    _, pages = memory
    found = comes(pages.data_ptr(), pages.numel(), AHEAD - HUGE)
    assert AHEAD - HUGE <= found <= AHEAD + 2 * HUGE
    assert not pages[: 2 * AHEAD].any()


def test_what_is_used_moves_it_on(memory):
    allocator, pages = memory
    used = 5 * AHEAD
    allocator.pages.used(pages.data_ptr(), used)
    assert comes(pages.data_ptr(), pages.numel(), used + AHEAD - HUGE) >= used + AHEAD - HUGE
    pages[:used].fill_(7)
    allocator.pages.used(pages.data_ptr(), used)
    allocator.pages.used(
        pages.data_ptr() + 64, pages.numel()
    )  # not the start of anything: let pass
    assert resident(pages.data_ptr(), pages.numel()) <= used + AHEAD + 2 * HUGE
    assert (pages[:used] == 7).all() and not pages[used : used + AHEAD].any()


def test_to_the_end_and_no_further(memory):
    allocator, pages = memory
    allocator.pages.used(pages.data_ptr(), pages.numel())
    assert (
        comes(pages.data_ptr(), pages.numel(), pages.numel() - 2 * HUGE) >= pages.numel() - 2 * HUGE
    )


def test_memory_that_slept_begins_anew(memory):
    allocator, pages = memory
    used = 8 * AHEAD
    allocator.pages.used(pages.data_ptr(), used)
    assert comes(pages.data_ptr(), pages.numel(), used) >= used
    allocator.sleep("kv_cache", keep=False)
    time.sleep(
        0.05
    )  # nothing brings it back: both ends are written, and one piece may have been on its way
    assert resident(pages.data_ptr(), pages.numel()) <= 3 * HUGE
    allocator.wake("kv_cache")
    assert comes(pages.data_ptr(), pages.numel(), AHEAD - HUGE) >= AHEAD - HUGE
