"""ZmqEngineClient: an API process's view of the engine process, over one DEALER socket in an asyncio loop.

The socket is read by a loop callback rather than by a task, so a message costs no context switch. ZeroMQ's file
descriptor signals changes only, which has one consequence: after every use of the socket, what has come meanwhile is
to be read (`_receive_soon`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol, cast

import msgspec
import zmq

from headrace.engine.ipc.client import EngineDead, EngineState
from headrace.engine.ipc.messages import (
    Abort,
    Call,
    CallReply,
    EngineFailed,
    EngineProgress,
    EngineReady,
    FromEngine,
    Outputs,
    RequestOutput,
    Shutdown,
    Stats,
    Submit,
    ToEngine,
    encoder,
    from_engine_decoder,
)

logger = logging.getLogger(__name__)

_RECONNECT_MS = 20  # the engine binds a moment after we connect
_LINGER_MS = 200
_LAST_WORDS_SECONDS = 0.25


class ProcessHandle(Protocol):
    """What is needed of an engine process (launch.EngineProcess) to notice its end."""

    @property
    def exit_code(self) -> int | None: ...

    def fileno(self) -> int:
        """Readable once the process has ended."""


class _Stream:
    """Outputs of one request that nobody has read yet, merged into one."""

    __slots__ = ("changed", "waiting")

    def __init__(self) -> None:
        self.waiting: RequestOutput | None = None
        self.changed = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self.waiting is None:
            self.waiting = output
        else:
            merge(self.waiting, output)
        self.changed.set()


def merge(first: RequestOutput, then: RequestOutput) -> None:
    """Add a later output of the same request to an earlier one."""
    first.token_ids = first.token_ids + then.token_ids
    first.logprobs = first.logprobs + then.logprobs
    first.finish_reason = then.finish_reason
    first.stop_token_id = then.stop_token_id
    first.error = then.error


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return cast(int, socket.getsockopt(zmq.FD))


def _events(socket: zmq.Socket[bytes]) -> int:
    """Not 0 when a message can be read."""
    return cast(int, socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN


class ZmqEngineClient:
    """EngineClient (engine/ipc/client.py) of a live engine process.

    With `process`, its end is noticed at once and `close` ends it; without, only what the engine says is known.
    """

    def __init__(self, address: str, process: ProcessHandle | None = None) -> None:
        self.state: EngineState = "starting"
        self.progress: EngineProgress | None = None
        self.info: EngineReady | None = None
        self.failure = ""
        self.stats = Stats()
        self._address = address
        self._process = process
        self._streams: dict[str, _Stream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 0
        self._settled: asyncio.Event = asyncio.Event()  # ready or failed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None

    async def start(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        socket = self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, _LINGER_MS),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
        ):
            socket.setsockopt(option, value)
        socket.connect(self._address)
        loop.add_reader(_descriptor(socket), self._receive)
        if self._process is not None:
            loop.add_reader(self._process.fileno(), self._process_ended)
        self._send(Call(-1, "stats"))  # the engine answers whoever speaks with its state

    async def wait_ready(self) -> EngineReady:
        await self._settled.wait()
        if self.info is None:
            raise EngineDead(self.failure)
        return self.info

    async def generate(self, submit: Submit) -> AsyncIterator[RequestOutput]:
        if self.failure:
            raise EngineDead(self.failure)
        request_id = submit.request_id
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} is in use")
        stream = self._streams[request_id] = _Stream()
        try:
            self._send(submit)
            while True:
                output, stream.waiting = stream.waiting, None
                if output is None:
                    if self.failure:
                        raise EngineDead(self.failure)
                    stream.changed.clear()
                    await stream.changed.wait()
                    continue
                if output.finish_reason:
                    # The engine is done with it: no abort, and it no longer counts as unfinished.
                    self._streams.pop(request_id, None)
                yield output
                if output.finish_reason:
                    return
        finally:
            if self._streams.pop(request_id, None) is not None:
                self.abort([request_id])

    def abort(self, request_ids: list[str]) -> None:
        if request_ids and not self.failure:
            self._send(Abort(request_ids))

    async def call(self, method: str, **args: Any) -> Any:
        """A utility's answer as plain data. RuntimeError with the engine's words when it fails."""
        if self.failure:
            raise EngineDead(self.failure)
        self._next_call += 1
        call_id = self._next_call
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(Call(call_id, method, args))
            return await future
        finally:
            del self._calls[call_id]

    @property
    def unfinished(self) -> int:
        return len(self._streams)

    async def close(self) -> None:
        """Whoever still waits gets EngineDead. The engine process, if it is ours, is asked to stop."""
        if self._process is not None and not self.failure:
            self._send(Shutdown())
        self._fail("the server is shutting down")

    # ---- the socket

    def _send(self, message: ToEngine) -> None:
        if self._socket is None:
            raise EngineDead(self.failure or "the client was not started")
        self._socket.send(encoder.encode(message), zmq.NOBLOCK)
        self._receive_soon()

    def _receive_soon(self) -> None:
        if self._loop is not None and self._socket is not None and _events(self._socket):
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = from_engine_decoder.decode(data)
            except msgspec.DecodeError as error:
                self._fail(f"the engine's message was not understood: {error}")
                return
            self._handle(message)

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:  # else it was aborted meanwhile
                    stream.put(output)
        elif isinstance(message, Stats):
            self.stats = message
        elif isinstance(message, EngineProgress):
            self.progress = message
        elif isinstance(message, EngineReady):
            self.info = message
            if self.state == "starting":
                self.state = "ready"
            self._settled.set()
        elif isinstance(message, EngineFailed):
            self._fail(message.message)
        elif isinstance(message, CallReply):
            self._take_reply(message)

    def _take_reply(self, reply: CallReply) -> None:
        future = self._calls.get(reply.call_id)
        if future is None or future.done():
            return
        if reply.error:
            future.set_exception(RuntimeError(reply.error))
        else:
            future.set_result(reply.result)

    # ---- the end

    def _process_ended(self) -> None:
        """A process that was killed could not say why; any other may have, and its last words be under way."""
        assert self._process is not None and self._loop is not None
        self._loop.remove_reader(self._process.fileno())
        code = self._process.exit_code
        if code is not None and code < 0:
            self._fail(f"the engine process was ended by signal {-code}")
        else:
            text = f"the engine process ended with exit code {code}; its log says why"
            self._loop.call_later(_LAST_WORDS_SECONDS, self._fail, text)

    def _fail(self, why: str) -> None:
        """Everyone who waits is told; the socket is closed."""
        if self.failure:
            return
        self.failure = why
        self.state = "failed"
        self._settled.set()
        for stream in self._streams.values():
            stream.changed.set()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDead(why))
        if self._loop is not None and self._process is not None:
            self._loop.remove_reader(self._process.fileno())
        if self._loop is not None and self._socket is not None:
            self._loop.remove_reader(_descriptor(self._socket))
            self._socket.close()
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None
