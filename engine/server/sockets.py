"""The listening socket, bound before anything slow begins: a port in use is found at once, nobody is refused later."""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from headrace.engine.config.settings import ServerSettings

BACKLOG = 2048


class BindError(RuntimeError):
    """The address cannot be listened on; the text says why and the way out."""


def bind(settings: ServerSettings) -> socket.socket:
    """Raises BindError."""
    try:
        return _bind_unix(settings.uds) if settings.uds else _bind_tcp(settings)
    except OSError as error:
        where = settings.uds or f"{settings.host}:{settings.port}"
        reason = (error.strerror or str(error)).lower()
        way_out = "--uds names another path" if settings.uds else "--port N picks another port"
        raise BindError(f"cannot listen on {where}: {reason}; {way_out}") from None


def _bind_tcp(settings: ServerSettings) -> socket.socket:
    infos = socket.getaddrinfo(
        settings.host or None,
        settings.port,
        type=socket.SOCK_STREAM,
        proto=socket.IPPROTO_TCP,
        flags=socket.AI_PASSIVE,
    )
    family, kind, protocol, _, address = infos[0]
    # The protocol is named: event loops set TCP_NODELAY only on sockets that say they are TCP.
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _bind_unix(path: str) -> socket.socket:
    if _is_dead_socket(path):
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _is_dead_socket(path: str) -> bool:
    """A socket file that a server left behind: nobody accepts on it."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
    except OSError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def url_of(sock: socket.socket) -> str:
    """Where clients find the server: "http://127.0.0.1:8000", or "unix:/path"."""
    address = sock.getsockname()
    if isinstance(address, str):
        return f"unix:{address}"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address[0], address[0])
    return f"http://[{host}]:{address[1]}" if ":" in host else f"http://{host}:{address[1]}"


def close(sock: socket.socket, settings: ServerSettings) -> None:
    """Close, and take a Unix socket's file away."""
    sock.close()
    if settings.uds:
        with contextlib.suppress(OSError):
            os.unlink(settings.uds)
