"""Cross-origin requests. Preflights carry no key and are answered before keys are looked at; refusals carry the
headers too, so that a page can read why."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response


class Cors:
    """`origins`: allowed ones, "*" for all. Credentials (cookies) are never used here, so never allowed."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._all = "*" in origins
        self._origins = frozenset(origins)

    def preflight(self, headers: Headers) -> Response | None:
        """The answer to a preflight (its allow-origin is added by `add`), or None for another OPTIONS request."""
        if "origin" not in headers or "access-control-request-method" not in headers:
            return None
        if not self._allowed(headers["origin"]):
            return Response(status_code=403)
        asked = headers.get("access-control-request-headers", "Authorization, Content-Type")
        return Response(
            status_code=204,
            headers={
                "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
                "Access-Control-Allow-Headers": asked,
                "Access-Control-Max-Age": "600",
            },
        )

    def add(self, origin: str | None, headers: MutableHeaders) -> None:
        """Headers of any answer."""
        if not self._all and self._origins:
            headers.add_vary_header("Origin")
        if origin is None or not self._allowed(origin):
            return
        headers["Access-Control-Allow-Origin"] = "*" if self._all else origin
        headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"

    def _allowed(self, origin: str) -> bool:
        return self._all or origin in self._origins
