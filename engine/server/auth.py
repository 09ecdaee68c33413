"""API keys: any of several, as `Authorization: Bearer KEY`."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers

from headrace.engine.server.errors import ApiError


class Keys:
    """No keys = everyone is let in. Digests are compared in constant time, each of them whatever matched before."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def check(self, headers: Headers) -> None:
        """Raises ApiError 401."""
        if not self._digests:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise _refused("This server needs an API key: Authorization: Bearer KEY.")
        digest = _digest(given.strip().encode("latin-1"))  # header bytes as they came
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise _refused("The API key is not valid.")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refused(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
