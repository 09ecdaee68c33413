"""Work in flight: ended by its result, by the client going away, or by the server closing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from headrace.engine.ipc.client import EngineDead
from headrace.engine.server.errors import ApiError, sentence, unavailable

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection; nobody reads the answer."""


class Flights:
    """Runs requests' work so that a disconnect or the server's end cancels it at once."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()
        self._closing: ApiError | None = None

    async def run(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """The work's result. The request's body must have been read: `receive` now only tells of a disconnect.

        Raises ClientGone, ApiError (its own, an engine's death as 503, or the one given to fail_all).
        """
        if self._closing is not None:
            work.close()
            raise self._closing
        task = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(_disconnected(receive))
        self._tasks.add(task)
        try:
            await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            if task.cancelled() and self._closing is not None:
                raise self._closing
            return task.result()
        except EngineDead as error:
            raise unavailable(sentence(str(error)), "engine_failed") from error
        finally:
            self._tasks.discard(task)
            watcher.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # seen, so that the loop does not log it as lost

    def fail_all(self, error: ApiError) -> None:
        """End every request in flight, and every later one, with this error."""
        self._closing = error
        for task in tuple(self._tasks):
            task.cancel()

    def __len__(self) -> int:
        return len(self._tasks)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
