"""The outermost middleware: request ids, CORS, keys, the server's phase, error objects for crashes, HTTP counts.

Raw ASGI, one wrapper around `send`: a stream's chunks pass through it untouched.
"""

from __future__ import annotations

import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.engine.server.auth import Keys
from headrace.engine.server.cors import Cors
from headrace.engine.server.errors import ApiError, internal, unavailable
from headrace.engine.server.sse import StreamBroken
from headrace.engine.server.state import ServerState

log = logging.getLogger("headrace.server")
access = logging.getLogger("headrace.access")

# Answered without a key: what load balancers and orchestrators ask. Exact paths, so no spelling slips by.
FREE_PATHS = frozenset({"/health", "/ready"})

# Answered in every phase. The rest needs the model: while it loads, they are 503 with Retry-After, /v1/models too,
# since a client that finds the model listed takes it as ready.
ANY_PHASE = frozenset({*FREE_PATHS, "/version", "/metrics", "/docs", "/openapi.json"})

RETRY_STARTING_S = 2
RETRY_DRAINING_S = 10


class Gate:
    """See the module."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._keys = Keys(state.config.server.api_keys)
        self._cors = Cors(state.config.server.cors_origins)
        self._root = state.config.server.root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A proxy may strip the prefix or leave it: both are understood.
        scope["root_path"] = self._root
        exchange = _Exchange(scope, send, self._cors)
        answer = self._early_answer(scope, exchange)
        guarded = exchange.path not in ANY_PHASE
        self._state.requests += guarded
        try:
            if answer is not None:
                await answer(scope, receive, exchange.send)
            else:
                await self._app(scope, receive, exchange.send)
        except StreamBroken:
            raise
        except ClientDisconnect:  # while it was sending its body: nobody is there to answer
            return
        except Exception:
            log.exception("request %s failed", exchange.request_id)
            if exchange.status:
                raise StreamBroken from None
            await internal().response()(scope, receive, exchange.send)
        finally:
            self._state.requests -= guarded
            self._count(scope, exchange)

    def _early_answer(self, scope: Scope, exchange: _Exchange) -> Response | None:
        """A preflight's answer or a refusal; None lets the request in."""
        if scope["method"] == "OPTIONS":
            preflight = self._cors.preflight(exchange.headers)
            if preflight is not None:
                return preflight
        try:
            if exchange.path not in FREE_PATHS:
                self._keys.check(exchange.headers)
            if exchange.path not in ANY_PHASE:
                self._check_phase()
        except ApiError as error:
            return error.response()
        return None

    def _check_phase(self) -> None:
        phase = self._state.phase
        if phase == "starting":
            raise unavailable(
                "The model is still loading; /ready tells how far it is.",
                "starting",
                RETRY_STARTING_S,
            )
        if phase == "draining":
            raise unavailable("The server is shutting down.", "draining", RETRY_DRAINING_S)
        if phase == "failed":
            raise unavailable(self._state.why_failed, "engine_failed")

    def _count(self, scope: Scope, exchange: _Exchange) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        status = exchange.status or 499  # the client went away before there was an answer
        self._state.metrics.http(method, route, status)
        if self._state.config.server.log_requests:
            seconds = time.monotonic() - scope["headrace.received"]
            access.info(
                "%s %.200s %d %.3fs %s",
                method,
                scope.get("raw_path", b"").decode("ascii", "backslashreplace"),
                status,
                seconds,
                exchange.request_id,
            )


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class _Exchange:
    """One request's path, id and status; `send` adds the headers that every answer has."""

    def __init__(self, scope: Scope, send: Send, cors: Cors) -> None:
        scope["headrace.received"] = time.monotonic()
        self.path = route_path(scope)
        self.headers = Headers(scope=scope)
        self.request_id = _request_id(self.headers.get("x-request-id"))
        self.status = 0
        self._send = send
        self._cors = cors

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self.request_id
            self._cors.add(self.headers.get("origin"), headers)
        await self._send(message)


def route_path(scope: Scope) -> str:
    """The path without the mount prefix (root_path), as the router will see it."""
    path, root = scope["path"], scope.get("root_path", "")
    if root and (path == root or path.startswith(root + "/")):
        return path[len(root) :]
    return path


def _request_id(given: str | None) -> str:
    """The client's own id when it is short and plain, else a new one."""
    if given and len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
