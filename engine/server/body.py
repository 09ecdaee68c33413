"""Request bodies: bytes to a checked struct. Every failure is a 400 with an OpenAI error object."""

from __future__ import annotations

import asyncio
import functools
import gc
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from headrace.engine.server.errors import invalid
from headrace.engine.server.fields import check_names

T = TypeVar("T", bound=msgspec.Struct)

# Above this size a body is parsed off the event loop, so that its checks do not hold up other streams.
LARGE_BODY = 256 << 10

# Decoding is one call that no other thread can interrupt, so what it may have to build is bounded before: a large body
# is long texts and token ids, never this many of anything else.
MAX_PARTS = 1 << 19  # objects, lists and strings, names of fields included
MAX_VALUES = 1 << 22  # elements, numbers among them

_PATH = re.compile(r"^(?P<text>.*?)(?: - at `(?P<key>key in )?\$(?P<path>[^`]*)`)?$", re.DOTALL)


async def read_body(request: Request, kind: type[T], max_nesting: int) -> T:
    """The request's body as `kind`. Raises ApiError (400); the size limit is the middleware's."""
    data = await request.body()
    if len(data) < LARGE_BODY:
        return parse_body(data, kind, max_nesting)
    return await asyncio.to_thread(parse_body, data, kind, max_nesting)


def parse_body(data: bytes, kind: type[T], max_nesting: int) -> T:
    """Raises ApiError for broken JSON, too deep nesting, unknown fields and wrong types.

    Duplicate keys: the last one counts. NaN and Infinity are not JSON; half a surrogate pair is not text.
    """
    if len(data) >= LARGE_BODY and _too_many_parts(data):
        raise invalid(
            f"The body holds more than {MAX_PARTS} objects, lists and strings or {MAX_VALUES} values."
        )
    value = _decode(data)
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.")
    if depth_over(value, max_nesting):
        raise invalid(f"The body is nested deeper than {max_nesting} levels.")
    check_names(value, _names(kind))
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None


def _too_many_parts(data: bytes) -> bool:
    """Counts without parsing; in whole-body operations, which take milliseconds for the largest body."""
    if _marks(data, b'[{"') <= MAX_PARTS and data.count(b",") <= MAX_VALUES:
        return False  # even if none of them stood inside a string
    # from here on every quote begins or ends a string
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"")
    strings = bare.count(b'"') // 2
    if strings > MAX_PARTS:
        return True
    outside = b"".join(bare.split(b'"')[::2])
    return strings + _marks(outside, b"[{") > MAX_PARTS or outside.count(b",") > MAX_VALUES


def _marks(data: bytes, marks: bytes) -> int:
    return sum(data.count(mark) for mark in marks)


def _decode(data: bytes) -> Any:
    # A hostile body can hold millions of empty containers; the collector would walk them again and again.
    pause = len(data) >= LARGE_BODY and gc.isenabled()
    if pause:
        gc.disable()
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise invalid("The body is nested too deeply.") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise invalid(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    finally:
        if pause:
            gc.enable()


def depth_over(value: Any, limit: int) -> bool:
    """Whether containers nest deeper than `limit`. Breadth first: no recursion."""
    level = [value]
    for _ in range(limit):
        level = [
            child
            for container in level
            for child in (container.values() if type(container) is dict else container)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return False
    return True


@functools.cache
def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__)


def _wrong_type(error: str) -> Exception:
    match = _PATH.match(error)
    if match is None or not match["path"]:
        missing = re.search(r"missing required field `(\w+)`", error)
        if missing:
            return invalid(f"'{missing[1]}' is required.", missing[1], "missing_required_parameter")
        return invalid(f"{error}.")
    param = match["path"].lstrip(".")
    text = match["text"].replace("`", "")
    where = f"a key of '{param}'" if match["key"] else f"'{param}'"
    return invalid(f"{where}: {text[:1].lower()}{text[1:]}.", param, "invalid_type")
