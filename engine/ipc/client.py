"""EngineClient: the API process's view of the engine. The real one speaks ZeroMQ; tests use a scripted one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

from headrace.engine.ipc.messages import EngineProgress, EngineReady, RequestOutput, Stats, Submit

EngineState = Literal["starting", "ready", "draining", "failed"]


class EngineDead(RuntimeError):
    """The engine ended; the text is what a client may read in a 503."""


class EngineClient(Protocol):
    state: EngineState
    progress: EngineProgress | None  # the latest start-up phase
    info: EngineReady | None  # set when ready
    failure: str  # why, when failed
    stats: Stats

    async def start(self) -> None:
        """Connect and begin to receive; does not wait for the engine to be ready."""

    async def wait_ready(self) -> EngineReady:
        """Raises EngineDead when the engine fails before it is ready."""

    def generate(self, submit: Submit) -> AsyncIterator[RequestOutput]:
        """Outputs until one has a finish_reason. Closing the iterator early aborts the request in the engine.

        Raises EngineDead when the engine ends. Outputs that wait are merged, so a slow reader never grows a queue.
        """

    def abort(self, request_ids: list[str]) -> None: ...

    async def call(self, method: str, **args: Any) -> Any: ...

    @property
    def unfinished(self) -> int:
        """Sequences submitted and not finished: what the queue limit counts."""

    async def close(self) -> None: ...
