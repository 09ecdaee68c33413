"""TextPool: tokenizing and templating off the event loop.

A prompt of 64k tokens takes a tenth of a second and more; in a thread the loop goes on (the `tokenizers` package
leaves the GIL, a template gives way every few milliseconds).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class PoolBusy(RuntimeError):
    """More work waits than the pool takes; the API answers 429."""


class TextPool:
    """`await pool.run(tokenizer.encode, text)`. Used from one event loop."""

    def __init__(self, threads: int = 2, max_pending: int = 1024):
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._max_pending = max_pending
        self._pending = 0

    @property
    def pending(self) -> int:
        """Calls that wait or run."""
        return self._pending

    async def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The call's result, or what it raised. PoolBusy at once when too many wait.

        A caller that is cancelled leaves its call in the queue only if it has begun already.
        """
        if self._pending >= self._max_pending:
            raise PoolBusy(f"{self._pending} prompts wait to be tokenized; try again later")
        self._pending += 1
        future = self._threads.submit(call, *args, **kwargs)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _tell(loop, self._done))
        return await asyncio.wrap_future(future)

    def _done(self) -> None:
        self._pending -= 1

    def close(self) -> None:
        """Drops what waits; does not wait for what runs."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody counts any more
        loop.call_soon_threadsafe(call)
