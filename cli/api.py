"""A small synchronous client of a headrace server, for chat and complete: errors are sentences."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from headrace.cli.errors import RUNTIME, CliError
from headrace.engine.config import env

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT = httpx.Timeout(connect=5.0, read=None, write=60.0, pool=None)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: a URL, and a Unix socket when `uds` is set."""

    url: str = DEFAULT_URL
    uds: str = ""
    key: str = ""

    def __str__(self) -> str:
        return self.uds or self.url

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


def address(url: str, key: str) -> Address:
    """From what the user typed: /v1 at the end and a missing scheme are forgiven, a path is a Unix socket."""
    key = key or env.read(env.API_KEY)
    if url.startswith(("/", "./", "unix:")):
        return Address("http://localhost", url.removeprefix("unix:").removeprefix("//"), key)
    url = (url or DEFAULT_URL).rstrip("/").removesuffix("/v1")
    return Address(url if "://" in url else f"http://{url}", "", key)


class Api:
    """Calls of one server. Every failure is a CliError that says what to do."""

    def __init__(self, where: Address) -> None:
        self.where = where
        transport = httpx.HTTPTransport(uds=where.uds) if where.uds else None
        self._http = httpx.Client(
            base_url=where.url,
            headers=where.headers(),
            timeout=TIMEOUT,
            transport=transport,
            trust_env=False,
        )

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Names the server answers to."""
        return [row["id"] for row in self._json("GET", "/v1/models")["data"]]

    def get(self, path: str) -> dict[str, Any]:
        return self._json("GET", path)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._json("POST", path, body)

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Events of a streamed answer. Closing the iterator drops the connection, which stops the answer."""
        with self._reach(), self._http.stream("POST", path, json={**body, "stream": True}) as reply:
            if reply.status_code != 200:
                reply.read()
                raise _refused(reply)
            for line in reply.iter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    return
                if not data:
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise CliError(f"the server stopped: {event['error'].get('message')}", RUNTIME)
                yield event

    def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        with self._reach():
            reply = self._http.request(method, path, json=body)
        if reply.status_code != 200:
            raise _refused(reply)
        return dict(reply.json())

    def _reach(self) -> _Reach:
        return _Reach(self.where)


class _Reach:
    """Turns transport errors into sentences."""

    def __init__(self, where: Address) -> None:
        self._where = where

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            raise CliError(
                f"no server answers at {self._where}; start one with headrace serve MODEL, name another with --url, "
                "or name a model (headrace chat demo, headrace complete -m demo)",
                RUNTIME,
            ) from None
        if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
            raise CliError(
                f"{self._where} is not a server's address; example: --url {DEFAULT_URL}"
            ) from None
        if isinstance(error, httpx.TransportError):
            raise CliError(f"the connection to {self._where} broke: {error}", RUNTIME) from None


def _refused(reply: httpx.Response) -> CliError:
    """The server's own sentence, with the way out where the status tells one."""
    try:
        text = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = f"HTTP {reply.status_code} {reply.reason_phrase}"
    if reply.status_code == 401:
        text = f"{text.rstrip('.')}; give the key with --key or HEADRACE_API_KEY"
    return CliError(f"the server refused: {text}", RUNTIME)
