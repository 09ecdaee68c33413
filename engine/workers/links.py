"""Links: how an executor reaches one worker, in a thread of this process or in a process of its own. Torch-free."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import IO, Any

from headrace.engine.config.env import child_environment
from headrace.engine.core.step import StepPlan, StepResult
from headrace.engine.workers.messages import (
    Call,
    Close,
    Failed,
    FromWorker,
    Setup,
    pack,
    unpack_from_worker,
)

log = logging.getLogger(__name__)

_LAST_LINES = 20
_GRACE_S = 5.0
_SWITCH_S = 5e-4


class LinkDown(RuntimeError):
    """The worker is gone; the text says how it went."""


class Link(ABC):
    """One worker. `fileno` is readable exactly while `receive` has something to return or to raise."""

    rank: int

    @abstractmethod
    def begin(self) -> None:
        """Hand over the setup. LinkDown."""

    @abstractmethod
    def send(self, message: StepPlan | Call | Close) -> None:
        """Does not wait for the worker. LinkDown."""

    @abstractmethod
    def receive(self) -> StepResult | FromWorker:
        """The next message; called when `fileno` is readable. LinkDown."""

    @abstractmethod
    def fileno(self) -> int: ...

    @abstractmethod
    def close(self, orderly: bool) -> None:
        """End the worker: after what it was sent, or at once. Leaves no thread, process or descriptor behind."""


class ThreadLink(Link):
    """A worker in a thread: two queues, and a pipe with one byte for each waiting message."""

    def __init__(self, setup: Setup) -> None:
        self.rank = setup.rank
        self._commands: SimpleQueue[Any] = SimpleQueue()
        self._messages: SimpleQueue[StepResult | FromWorker] = SimpleQueue()
        self._read, self._write = os.pipe()
        self._thread = threading.Thread(
            target=self._main, args=(setup,), name="headrace-worker", daemon=True
        )

    def begin(self) -> None:
        # Two threads take turns many times a step: by default one that needs the interpreter waits up to 5 ms for the
        # other, a step's time (128 streams on a GPU: 7 % more tokens).
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()

    def _main(self, setup: Setup) -> None:
        try:
            from headrace.engine.workers.serve import WorkerLoop  # the first import of torch

            WorkerLoop(setup, self._commands, self._post).run()
        except BaseException as error:
            log.exception("the worker thread ended")
            self._post(Failed(f"{type(error).__name__}: {error}"))

    def _post(self, message: StepResult | FromWorker) -> None:
        self._messages.put(message)
        os.write(self._write, b"\0")

    def send(self, message: StepPlan | Call | Close) -> None:
        self._commands.put(message)

    def receive(self) -> StepResult | FromWorker:
        os.read(self._read, 1)
        return self._messages.get()

    def fileno(self) -> int:
        return self._read

    def close(self, orderly: bool) -> None:
        """A thread cannot be killed: one that hangs is left to the end of the process, with its pipe."""
        if self._thread.ident is not None:
            self._commands.put(Close())
            self._thread.join(_GRACE_S)
        if self._thread.is_alive():
            log.warning("the worker thread does not end; it is left behind")
            return
        os.close(self._read)
        os.close(self._write)


class ProcessLink(Link):
    """A worker in a process: one socket pair, whose end-of-file tells each side of the other's death."""

    def __init__(self, setup: Setup, environment: Mapping[str, str]) -> None:
        self.rank = setup.rank
        self._setup = setup
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.engine.workers.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=child_environment(**environment),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        self._pipe = Connection(ours.detach())
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        assert self._process.stderr is not None
        self._drain = threading.Thread(
            target=self._read_stderr, args=(self._process.stderr,), daemon=True
        )
        self._drain.start()

    def begin(self) -> None:
        self.send(self._setup)

    def _read_stderr(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip()
                self._last.append(text)
                log.info("worker %d: %s", self.rank, text)

    def send(self, message: StepPlan | Call | Close | Setup) -> None:
        try:
            self._pipe.send_bytes(pack(message))
        except OSError:
            raise LinkDown(self._obituary()) from None

    def receive(self) -> StepResult | FromWorker:
        try:
            return unpack_from_worker(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise LinkDown(self._obituary()) from None

    def _obituary(self) -> str:
        """How the process ended, and its last lines."""
        code = self._ended(_GRACE_S)
        if code is None:
            how = "closed its pipe but did not end"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += " (perhaps for memory: a smaller KV cache or fewer sequences may help)"
        else:
            how = f"ended with exit code {code}"
        self._drain.join(1.0)
        said = " | ".join(line for line in self._last if line)
        return f"pid {self._process.pid} {how}" + (f"; its last lines: {said}" if said else "")

    def _ended(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def fileno(self) -> int:
        return self._pipe.fileno()

    def close(self, orderly: bool) -> None:
        if orderly:
            try:
                self.send(Close())
                self._ended(_GRACE_S)
            except LinkDown:
                pass
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if not self._pipe.closed:
            self._pipe.close()
        self._drain.join(1.0)
