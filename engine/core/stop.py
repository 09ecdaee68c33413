"""StopSignal: one flag that a signal handler or a thread sets and a poll can wait for."""

from __future__ import annotations

import contextlib
import os
import signal

# From the API process to its engine process. None of the signals that others send to stop a service: those are the API
# process's business (see core/process.py).
STOP_SIGNAL = signal.SIGUSR1


class StopSignal:
    """Set once, never cleared. `fileno` is readable from then on."""

    def __init__(self) -> None:
        self.reason = ""
        self.is_set = False
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)

    def set(self, reason: str) -> None:
        if not self.is_set:
            self.reason = reason
            self.is_set = True
            with contextlib.suppress(OSError):
                os.write(self._write_fd, b"x")

    def fileno(self) -> int:
        return self._read_fd
