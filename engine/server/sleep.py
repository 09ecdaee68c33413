"""Sleep over HTTP: the device's memory is lent to others, with the paths and parameters that vLLM has for it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.engine.ipc.client import EngineDead
from headrace.engine.server.errors import ApiError, invalid, sentence, unavailable
from headrace.engine.server.routes import json_response, state_of

router = APIRouter()

# A tag's name here -> in the engine. vLLM says kv_cache.
TAGS = {"weights": "weights", "kv_cache": "kv"}
_SHOWN = {name: tag for tag, name in TAGS.items()}

_LEVELS, _MODES = ("1", "2"), ("abort", "wait")


def _shown(**parameters: tuple[str, ...]) -> dict[str, Any]:
    """What /docs shows of query parameters that are read here by hand: their values, the default first."""
    return {
        "parameters": [
            {"name": name, "in": "query", "schema": {"type": "string", "enum": list(values)}}
            for name, values in parameters.items()
        ]
    }


@router.post("/sleep", openapi_extra=_shown(level=_LEVELS, mode=_MODES))
async def sleep(request: Request) -> Response:
    """Give the device's memory back. `level` 1 keeps the weights in host memory, 2 drops them and reads the files
    again at wake_up; the KV cache is dropped. `mode` abort ends what runs, wait lets it finish. Answers when done."""
    _require_enabled(request)
    given = _parameters(request, "level", "mode")
    level, mode = given.get("level", "1"), given.get("mode", "abort")
    if level not in _LEVELS:
        raise invalid(
            f"'level' is 1 (weights to host memory) or 2 (weights dropped), not {level[:32]!r}.",
            "level",
        )
    if mode not in _MODES:
        raise invalid(
            f"'mode' is abort (running requests end) or wait (they finish first), not {mode[:32]!r}.",
            "mode",
        )
    answer = await _call(request, "sleep_failed", "sleep", level=int(level), mode=mode)
    freed = {_SHOWN[name]: count for name, count in answer["freed"].items()}
    return json_response(
        {
            "is_sleeping": True,
            "level": answer["level"],
            "freed_bytes": freed,
            "notes": answer["notes"],
        }
    )


@router.post("/wake_up", openapi_extra=_shown(tags=tuple(TAGS)))
async def wake_up(request: Request) -> Response:
    """Take the memory again: all of it, or only `tags` (weights, kv_cache; may be repeated). Answers when done."""
    _require_enabled(request)
    _parameters(request, "tags")
    tags = [tag for value in request.query_params.getlist("tags") for tag in value.split(",")]
    for tag in tags:
        if tag not in TAGS:
            raise invalid(f"'tags' are {' and '.join(TAGS)}, not {tag[:32]!r}.", "tags")
    answer = await _call(request, "wake_up_failed", "wake", tags=[TAGS[tag] for tag in tags])
    asleep = [_SHOWN[name] for name in answer["asleep"]]
    return json_response({"is_sleeping": bool(asleep), "asleep": asleep, "notes": answer["notes"]})


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """True from the moment that sleep is asked for until all is awake."""
    return json_response({"is_sleeping": state_of(request).client.stats.sleeping})


def _require_enabled(request: Request) -> None:
    if not state_of(request).config.cache.sleep_mode:
        raise ApiError(
            404,
            "This server was started without sleep mode; start it with --enable-sleep-mode.",
            code="not_enabled",
        )


def _parameters(request: Request, *known: str) -> dict[str, str]:
    """The query's parameters. 400 names one that is not `known`."""
    given = dict(request.query_params)
    for name in given:
        if name not in known:
            raise invalid(
                f"{request.url.path} takes {' and '.join(known)}, not {name[:32]!r}.", name[:32]
            )
    return given


async def _call(request: Request, code: str, method: str, **args: Any) -> Any:
    try:
        return await state_of(request).client.call(method, **args)
    except EngineDead as error:
        raise unavailable(sentence(str(error)), "engine_failed") from error
    except RuntimeError as error:  # the worker's words
        raise unavailable(sentence(str(error)), code) from None
