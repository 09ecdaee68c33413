"""The FastAPI application over a ServerState."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from headrace.engine.server.errors import ApiError, internal
from headrace.engine.server.gate import Gate, route_path
from headrace.engine.server.limits import BodyLimit
from headrace.engine.server.routes import router
from headrace.engine.server.sleep import router as sleep_router
from headrace.engine.server.state import ServerState, version


def create_app(state: ServerState) -> FastAPI:
    """All routes and middlewares. The application holds no state of its own: everything is in `state`."""
    server = state.config.server
    app = FastAPI(
        title="headrace",
        version=version(),
        redirect_slashes=False,  # a path with a slash too many is unknown, not another spelling
        redoc_url=None,
    )
    app.state.headrace = state
    app.include_router(router)
    app.include_router(sleep_router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(BodyLimit, limit=server.max_body_bytes)
    app.add_middleware(Gate, state=state)  # added last = outermost
    return app


async def _api_error(_request: Request, error: Exception) -> Response:
    return error.response() if isinstance(error, ApiError) else internal().response()


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's own refusals (404, 405) as OpenAI error objects."""
    if not isinstance(error, HTTPException):
        return internal().response()
    method, path = request.method, route_path(request.scope)
    if error.status_code == 404:
        refusal = ApiError(404, f"There is no {method} {path[:200]} here.", code="not_found")
    elif error.status_code == 405:
        refusal = ApiError(
            405, f"{path[:200]} does not answer {method}.", code="method_not_allowed"
        )
    else:
        refusal = ApiError(error.status_code, str(error.detail))
    refusal.headers = dict(error.headers or {})
    return refusal.response()
