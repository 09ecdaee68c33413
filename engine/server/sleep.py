"""Sleep over HTTP: the device's memory is lent to others, with the paths and parameters that vLLM has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.engine.ipc.messages import SLEEP_TAGS
from headrace.engine.server.errors import ApiError, invalid, unavailable
from headrace.engine.server.routes import call_engine, json_response, state_of

router = APIRouter()

_LEVELS = {"1": "weights to host memory", "2": "weights dropped"}
_MODES = {"abort": "running requests end", "wait": "they finish first"}


@router.post("/sleep")
async def sleep(request: Request) -> Response:
    """Give the device's memory back. `level` 1 keeps the weights in host memory, 2 drops them and reads the files
    again at wake_up; the KV cache is dropped. `mode` abort ends what runs, wait lets it finish. Answers when done."""
    _check(request, "level", "mode")
    level, mode = _choice(request, "level", _LEVELS), _choice(request, "mode", _MODES)
    answer = await _call(request, "sleep_failed", "sleep", level=int(level), mode=mode)
    return json_response({"is_sleeping": True, **answer})


@router.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Take the memory again: all of it, or only `tags` (weights, kv_cache; may be repeated). Answers when done."""
    _check(request, "tags")
    tags = [tag for value in request.query_params.getlist("tags") for tag in value.split(",")]
    for tag in tags:
        if tag not in SLEEP_TAGS:
            raise invalid(f"'tags' are {' and '.join(SLEEP_TAGS)}, not {tag[:32]!r}.", "tags")
    answer = await _call(request, "wake_up_failed", "wake", tags=tags)
    return json_response({"is_sleeping": bool(answer["asleep"]), **answer})


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """True from the moment that sleep is asked for until all is awake."""
    return json_response({"is_sleeping": state_of(request).client.stats.sleeping})


def _check(request: Request, *known: str) -> None:
    """404 where sleep is not offered, 400 for a parameter that is not known."""
    if not state_of(request).config.cache.sleep_mode:
        way_out = "This server was started without sleep mode; start it with --enable-sleep-mode."
        raise ApiError(404, way_out, code="not_enabled")
    for name in request.query_params:
        if name not in known:
            told = f"{request.url.path} takes {' and '.join(known)}, not {name[:32]!r}."
            raise invalid(told, name[:32])


def _choice(request: Request, name: str, values: Mapping[str, str]) -> str:
    """The query's value, one of `values`, which say what each does; the first is the default."""
    given = request.query_params.get(name, next(iter(values)))
    if given not in values:
        options = " or ".join(f"{value} ({meaning})" for value, meaning in values.items())
        raise invalid(f"'{name}' is {options}, not {given[:32]!r}.", name)
    return given


async def _call(request: Request, code: str, method: str, **args: Any) -> Any:
    return await call_engine(request, lambda why: unavailable(why, code), method, **args)
