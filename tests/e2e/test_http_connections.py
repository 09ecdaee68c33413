"""Connections that misbehave: what is not HTTP, heads without end, pipelines, slow readers, half-closed sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.engine.server import connection as protocol
from tests.e2e.http_helpers import USER, still_fine
from tests.e2e.scripted import Live, Script, ScriptedEngine, live, text_tokens


@contextmanager
def connected(server: Live) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        yield sock


def read_all(sock: socket.socket) -> bytes:
    pieces = []
    try:
        while piece := sock.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:  # closed while we were still sending
        pass
    return b"".join(pieces)


def request(path: str = "/v1/completions", last: bool = True, **fields: object) -> bytes:
    data = json.dumps(fields or {"prompt": "a"}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    return (head + ("Connection: close\r\n" if last else "") + "\r\n").encode() + data


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"FOO /health HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
    ],
)
def test_what_is_not_http_gets_an_error_object(server: Live, data: bytes) -> None:
    with connected(server) as sock:
        sock.sendall(data)
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"
    still_fine(server)


@pytest.mark.parametrize("endless", [b"A: bbbbbbbb\r\n" * 100, b"b" * 1000])
def test_a_head_without_end_is_cut_off(server: Live, endless: bytes) -> None:
    with connected(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
        sent = 0
        try:
            while sent < 64 << 20:
                sock.sendall(endless)
                sent += len(endless)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert sent < 16 << 20
    still_fine(server)


def test_a_large_head_is_refused_with_words(server: Live) -> None:
    with connected(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nX: " + b"b" * (protocol.MAX_HEAD_BYTES + 1))
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "head_too_large"
    with connected(server) as sock:
        sock.sendall(
            b"GET /health HTTP/1.1\r\nConnection: close\r\nX: " + b"b" * 60_000 + b"\r\n\r\n"
        )
        assert read_all(sock).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"", b"GET /health HTT"])
def test_connections_that_ask_nothing_are_closed(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    with (
        live(ScriptedEngine(Script(text_tokens("x") * 20, delay=0.05))) as server,
        connected(server) as sock,
    ):
        sock.sendall(sent)
        assert read_all(sock) == b""
        with connected(server) as other:  # an answer may take longer than that
            other.sendall(request(prompt="a", stream=True, max_tokens=20))
            assert b"data: [DONE]" in read_all(other)


def test_pipelined_requests_are_answered_in_order(server: Live) -> None:
    with connected(server) as sock:
        last = request("/v1/chat/completions", messages=USER)
        sock.sendall(request(last=False) * 5 + request(prompt="a", stream=True, last=False) + last)
        answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 200 ") == 7 and answer.count(b"data: [DONE]") == 1
    order = [answer.rindex(b'"text_completion"'), answer.index(b"[DONE]")]
    assert order == sorted(order) and answer.index(b'"chat.completion"') > order[1]


def test_many_idle_connections_harm_nobody(server: Live) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(500)]
    try:
        for sock in idle[::2]:
            sock.sendall(request()[:30])
        still_fine(server)
    finally:
        for sock in idle:
            sock.close()
    still_fine(server)


def test_a_socket_closed_for_writing_counts_as_gone(server: Live) -> None:
    """Nobody can tell it from a client that left; what matters is that the server goes on."""
    with connected(server) as sock:
        sock.sendall(request(prompt="a", stream=True))
        sock.shutdown(socket.SHUT_WR)
        read_all(sock)
    still_fine(server)
