"""Progress on standard error: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.cli import BEGAN

if TYPE_CHECKING:
    from headrace.engine.ipc.messages import EngineProgress

POLL_SECONDS = 0.1
LINE_SHARE = 0.25  # off a terminal, one line for each quarter of a download

PHASES = {
    "open": "opening the device",
    "load": "loading weights",
    "measure": "measuring memory",
    "kv": "allocating the KV cache",
    "init_kv": "allocating the KV cache",
    "warm-up": "warming up",
    "warm_up": "warming up",
}


def _bar(download: bool) -> Any:
    """A rich progress bar on standard error, gone when it stops; not started yet."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    columns = (
        (DownloadColumn(), TransferSpeedColumn())
        if download
        else (TaskProgressColumn(), TimeElapsedColumn())
    )
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        console=Console(stderr=True),
        transient=True,
    )


def test_bar() -> Any:
    """The bar of a run over tests; not started yet."""
    return _bar(download=False)


class DownloadBar:
    """Shows the download of a model; nothing at all while nothing is downloaded. Updates may come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._terminal = sys.stderr.isatty()
        self._progress: Any = None
        self._task: Any = None
        self._said = -1.0

    def __enter__(self) -> DownloadBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, done: float, total: float, text: str) -> None:
        with self._lock:
            if self._terminal:
                self._draw(done, total, text)
            elif total and (done / total >= self._said + LINE_SHARE or self._said < 0):
                self._said = done / total
                print(f"headrace: {text}: {100 * done / total:.0f} %", file=sys.stderr, flush=True)

    def _draw(self, done: float, total: float, text: str) -> None:
        if self._progress is None:
            self._progress = _bar(download=True)
            self._progress.start()
            self._task = self._progress.add_task(text, total=None)
        self._progress.update(self._task, completed=done, total=total or None, description=text)


class StartBar:
    """Follows the engine's start-up phases until `stop`; draws on a terminal only.

    `latest` returns the newest progress message; it is asked by a thread, so the server's event loop does nothing
    for it.
    """

    def __init__(self, latest: Callable[[], EngineProgress | None]) -> None:
        self._latest = latest
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> StartBar:
        if sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar away. Idempotent."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _follow(self) -> None:
        with _bar(download=False) as progress:
            task = progress.add_task("starting the engine", total=None)
            while not self._over.wait(POLL_SECONDS):
                news = self._latest()
                if news is not None:
                    text = PHASES.get(news.phase, news.phase)
                    progress.update(
                        task, completed=news.done, total=news.total or None, description=text
                    )


def process_seconds() -> float:
    """Seconds since the command began."""
    return time.monotonic() - BEGAN
