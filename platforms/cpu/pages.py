"""Pages of the KV cache are taken ahead of the prompts that write them.

Memory from the system costs nothing until it is written; then each page is zeroed, inside the step that writes it: a
tenth of a short prompt's time. A thread of the lowest priority does that beforehand, for each piece of memory as far as
it was used and AHEAD bytes more.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from queue import SimpleQueue
from typing import Any

import torch

# Bytes of one layer's cache: some thousand tokens of a small model, a prompt of a large one.
AHEAD = 4 << 20
# A huge page. They are taken one by one, so that nobody who changes the address space waits for long.
_PIECE = 2 << 20
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; mmap has no name for it


def _madvise() -> Any:
    """The system's call; None where there is none."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


MADVISE = _madvise()


class PagesAhead:
    def __init__(self) -> None:
        self._wanted: SimpleQueue[tuple[torch.Tensor, int, int] | None] = SimpleQueue()
        self._watched: dict[
            int, tuple[torch.Tensor, int]
        ] = {}  # by address: memory, bytes asked for
        self._thread: threading.Thread | None = None

    def watch(self, memory: torch.Tensor) -> None:
        """From here on keep pages of `memory` (uint8, never written) ahead of its use, from its start on."""
        if MADVISE is not None and memory.numel() > AHEAD:
            self._watched[memory.data_ptr()] = memory, 0
            self.used(memory.data_ptr(), 0)

    def used(self, address: int, nbytes: int) -> None:
        """The first `nbytes` of the memory at this address are written now. Cheap; unknown addresses are let pass."""
        memory, asked = self._watched.get(address, (None, 0))
        if memory is None or (asked and nbytes + AHEAD // 2 <= asked):
            return
        upto = min((nbytes + AHEAD + _PIECE - 1) // _PIECE * _PIECE, memory.numel())
        if upto > asked:
            self._watched[address] = memory, upto
            self._wanted.put((memory, asked, upto))
            self._start()

    def forget(self, memory: torch.Tensor) -> None:
        self._watched.pop(memory.data_ptr(), None)

    def close(self) -> None:
        """Ends the thread: it takes a piece more at most."""
        self._watched.clear()
        self._wanted.put(None)
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.close)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._take, name="pages-ahead", daemon=True)
            self._thread.start()
            # a thread that still runs when the interpreter ends is unwound, which C++ below it answers with abort()
            atexit.register(self.close)

    def _take(self) -> None:
        # of this thread alone, on Linux
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while (asked := self._wanted.get()) is not None:
            memory, first, last = asked
            start = memory.data_ptr()
            for at in range(first, last, _PIECE):
                if start not in self._watched:
                    break
                low = -(-(start + at) // _PIECE) * _PIECE  # whole huge pages within the memory
                if low + _PIECE <= start + memory.numel() and MADVISE(low, _PIECE, POPULATE_WRITE):
                    return  # an older system, or no memory left: pages come when they are written
            del memory, asked
