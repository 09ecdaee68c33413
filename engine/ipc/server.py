"""EngineServer: the engine's end of the ZeroMQ socket. One ROUTER socket; every API process is one DEALER."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator

import msgspec
import zmq

from headrace.engine.ipc.messages import (
    FromEngine,
    RequestOutput,
    ToEngine,
    encoder,
    to_engine_decoder,
)

logger = logging.getLogger(__name__)

# Longest wait for the last messages (why the engine ends) to leave when the socket is closed.
_LINGER_MS = 1000
_LAST_WORDS_MS = 1000


class EngineServer:
    """Sends never block and nothing is dropped: what waits for a slow reader is bounded by the requests it made."""

    def __init__(self, address: str) -> None:
        """`address` is a ZeroMQ endpoint, "ipc:///path". zmq.ZMQError when it cannot be bound."""
        self._context = zmq.Context(io_threads=1)
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self.socket.bind(address)
        self._clients: set[bytes] = set()
        self._inbox: deque[tuple[bytes, ToEngine]] = deque()
        self._announced: FromEngine | None = None

    def receive(self) -> Iterator[tuple[bytes, ToEngine]]:
        """(client, message) for all that waits; never blocks. A message that is none is logged and skipped."""
        self._take_in()
        while self._inbox:
            yield self._inbox.popleft()

    def _take_in(self) -> None:
        while True:
            try:
                client, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if client not in self._clients:
                self._clients.add(client)
                if self._announced is not None:
                    self.send(client, self._announced)
            try:
                self._inbox.append((client, to_engine_decoder.decode(b"".join(frames))))
            except msgspec.DecodeError as error:
                logger.error("a message to the engine was dropped: %s", error)

    def announce(self, message: FromEngine) -> None:
        """Tell the engine's state to everyone, and to whoever connects later."""
        self._take_in()  # who spoke up since the last time is told, too
        self._announced = message
        self.broadcast(message)

    def announce_last(self, message: FromEngine) -> None:
        """Before the process ends. An API process that has not been heard of yet gets a moment to connect."""
        self._take_in()
        if not self._clients:
            self.socket.poll(_LAST_WORDS_MS)
        self.announce(message)

    def send(self, client: bytes, message: FromEngine) -> None:
        self.socket.send_multipart([client, encoder.encode(message)], zmq.NOBLOCK)

    def broadcast(self, message: FromEngine) -> None:
        """To every API process that has said something."""
        data = encoder.encode(message)
        for client in self._clients:
            self.socket.send_multipart([client, data], zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close()
        self._context.term()


class Audience:
    """Which client waits for which request."""

    def __init__(self) -> None:
        self._client_of: dict[str, bytes] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._client_of

    def add(self, request_id: str, client: bytes) -> None:
        self._client_of[request_id] = client

    def split(self, outputs: list[RequestOutput]) -> dict[bytes, list[RequestOutput]]:
        """Outputs by client, in order; a finished request has no client any more."""
        shares: dict[bytes, list[RequestOutput]] = {}
        for output in outputs:
            if output.finish_reason:
                client = self._client_of.pop(output.request_id)
            else:
                client = self._client_of[output.request_id]
            shares.setdefault(client, []).append(output)
        return shares
