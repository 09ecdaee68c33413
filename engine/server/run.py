"""The API process: HTTP from the first moment, the engine watched, drained on SIGTERM.

Exit codes of `serve`: 0 after a signal, 1 when the engine failed or could not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import uvicorn

from headrace.engine.config.settings import EngineConfig
from headrace.engine.ipc.client import EngineClient, EngineDead
from headrace.engine.ipc.messages import EngineReady
from headrace.engine.server.app import create_app
from headrace.engine.server.connection import Connection
from headrace.engine.server.defaults import read_defaults
from headrace.engine.server.errors import ApiError, sentence, unavailable
from headrace.engine.server.names import ModelNames
from headrace.engine.server.params import SamplingDefaults
from headrace.engine.server.sockets import bind, close
from headrace.engine.server.sse import StreamBroken
from headrace.engine.server.state import ServerState
from headrace.engine.text.tokenizer import Tokenizer
from headrace.engine.weights.source import ModelFiles

log = logging.getLogger("headrace.server")

WATCH_SECONDS = 0.2  # how often the engine process is looked at
LINGER_SECONDS = 1.0  # after the engine's death: time for clients and probes to read why
STOP_SECONDS = 5.0  # for the engine process to end on its own
KEEP_ALIVE_SECONDS = 75  # longer than the idle limit of usual proxies and client pools

OnReady = Callable[[EngineReady, socket.socket], None]


class EngineProcess(Protocol):
    """What is needed of the engine's process (engine/ipc/launch.py)."""

    @property
    def exit_code(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int | None: ...

    def stop(self, timeout: float = 10.0) -> int: ...


def serve(
    config: EngineConfig,
    files: ModelFiles,
    tokenizer: Tokenizer,
    client: EngineClient,
    engine_process: EngineProcess | None,
    *,
    sock: socket.socket | None = None,
    on_ready: OnReady | None = None,
) -> int:
    """Serve until a signal or the engine's end; the exit code. Call from the main thread.

    `sock`: from `bind`, when the caller wanted to know of a taken port before it started the engine. Raises BindError
    without it. `on_ready` is called once in the event loop; it must not block.
    """
    sock = sock or bind(config.server)
    state = make_state(config, files, tokenizer, client)
    service = Service(state, sock, engine_process, on_ready)
    loop = _new_loop()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, service.stop)
        return loop.run_until_complete(service.run())
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        close(sock, config.server)
        if engine_process is not None and engine_process.wait(STOP_SECONDS) is None:
            engine_process.stop()


def make_state(
    config: EngineConfig, files: ModelFiles, tokenizer: Tokenizer, client: EngineClient
) -> ServerState:
    wanted = config.model.generation_defaults
    defaults = read_defaults(files.generation_config) if wanted else SamplingDefaults()
    names = ModelNames(files.name, config.server.served_model_names)
    return ServerState(config, tokenizer, client, names, defaults)


class Service:
    """One server's life: start, watch, drain, end."""

    def __init__(
        self,
        state: ServerState,
        sock: socket.socket,
        engine_process: EngineProcess | None = None,
        on_ready: OnReady | None = None,
    ) -> None:
        self._state = state
        self._sock = sock
        self._engine = engine_process
        self._on_ready = on_ready
        self._was_ready = False
        self._signals = 0
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()
        self._http = _Http(_http_config(state))

    def stop(self) -> None:
        """First call: drain and end. Second: end at once. Call in the event loop's thread."""
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            self._at_once.set()

    async def run(self) -> int:
        http = asyncio.ensure_future(self._http.serve(sockets=[self._sock]))
        engine = asyncio.ensure_future(self._watch_engine())
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await self._state.client.start()
            await asyncio.wait((http, engine, stop), return_when=asyncio.FIRST_COMPLETED)
            if http.done():
                http.result()  # raises what ended it
            if stop.done() and not engine.done():
                await self._drain(engine)
            if engine.done():
                await self._engine_failed(engine.result())
                return 1
            return 0
        finally:
            stop.cancel()
            engine.cancel()
            await self._close(http)

    async def _watch_engine(self) -> str:
        """Ends with the reason when the engine has failed; calls on_ready on the way."""
        ready = asyncio.ensure_future(self._state.client.wait_ready())
        try:
            while True:
                await asyncio.wait((ready,), timeout=WATCH_SECONDS)
                if ready.done() and not self._was_ready:
                    try:
                        self._ready(ready.result())
                    except EngineDead as error:
                        return str(error)
                if self._state.client.state == "failed":
                    return self._state.client.failure
                if self._engine is not None and self._engine.exit_code is not None:
                    return f"the engine process has ended with code {self._engine.exit_code}"
                if ready.done():
                    await asyncio.sleep(WATCH_SECONDS)
        finally:
            ready.cancel()

    def _ready(self, info: EngineReady) -> None:
        self._was_ready = True
        gc.collect()
        gc.freeze()  # what start-up made lives as long as the process: not the collector's business
        if self._on_ready is not None:
            self._on_ready(info, self._sock)

    async def _drain(self, engine: asyncio.Future[str]) -> None:
        """New requests are refused, those in flight finish, up to the limit, a second signal or the engine's death."""
        state, seconds = self._state, self._state.config.server.drain_seconds
        state.draining = True
        if state.requests:
            log.info("draining: %d requests have %.0f s to finish", state.requests, seconds)
        deadline = time.monotonic() + seconds
        while state.requests and not engine.done() and not self._at_once.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            await asyncio.sleep(min(0.05, left))
        if not engine.done():
            error = unavailable(
                "The server is shutting down and ended this request.", "shutting_down"
            )
            await self._end_requests(error, 0.0 if self._at_once.is_set() else LINGER_SECONDS)

    async def _engine_failed(self, reason: str) -> None:
        self._state.failure = reason
        log.error("the engine failed: %s", reason)
        await self._end_requests(unavailable(sentence(reason), "engine_failed"), 0.0)
        if self._was_ready and not self._at_once.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._at_once.wait(), LINGER_SECONDS)

    async def _end_requests(self, error: ApiError, seconds: float) -> None:
        """Fail what is in flight and give the answers a moment to leave."""
        self._state.flights.fail_all(error)
        deadline = time.monotonic() + seconds
        await asyncio.sleep(0)
        while self._state.requests and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def _close(self, http: asyncio.Future[None]) -> None:
        self._http.should_exit = True
        self._http.force_exit = self._at_once.is_set()
        try:
            await http
        finally:
            await self._state.client.close()
            self._state.text.close()


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: the service has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _http_config(state: ServerState) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").addFilter(_not_broken_stream)
    return uvicorn.Config(
        create_app(state),
        http=Connection,
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        log_level="error",  # its warnings are about what clients send, who could fill a log with them
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=2,
    )


def _not_broken_stream(record: logging.LogRecord) -> bool:
    """StreamBroken asks uvicorn to close a connection; it is no crash to log."""
    return not (record.exc_info and isinstance(record.exc_info[1], StreamBroken))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on every system
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
