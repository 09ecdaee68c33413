"""Parsers of the flag table: text from the command line or a native YAML value -> a setting's value.

Each raises ValueError with one sentence that says what is allowed; the caller adds which flag or line it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headrace.engine.config.sizes import parse_size

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


def text(value: Any) -> str:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"expected text, got {_kind(value)}")


def boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError(f"expected true or false, got {value!r}")


def integer(low: int, high: int | None = None) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        allowed = f"{low} or more" if high is None else f"{low} to {high}"
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if not isinstance(number, int) or isinstance(number, bool):
            raise ValueError(f"expected a whole number, {allowed}, got {value!r}")
        if number < low or (high is not None and number > high):
            raise ValueError(f"{number} is out of range; allowed is {allowed}")
        return number

    return parse


def number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[Any], float]:
    """A number in [low, high], or in (low, high] with `above`."""

    def parse(value: Any) -> float:
        bound = f"{'more than' if above else 'at least'} {low:g}"
        allowed = bound if high == math.inf else f"{bound} and at most {high:g}"
        try:
            result = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            result = math.nan
        inside = (low < result if above else low <= result) and result <= high
        if not inside or math.isinf(result):
            raise ValueError(f"expected a number, {allowed}, got {value!r}")
        return result

    return parse


def choice(
    values: Iterable[str], synonyms: Mapping[str, str] | None = None
) -> Callable[[Any], str]:
    known = {value: value for value in values} | dict(synonyms or {})

    def parse(value: Any) -> str:
        word = str(value).lower()
        if word not in known:
            raise ValueError(f"{value!r} is none of {', '.join(values)}")
        return known[word]

    return parse


def mapped(table: Mapping[str, Any]) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        word = str(value).lower()
        if word not in table:
            raise ValueError(f"{value!r} is none of {', '.join(table)}")
        return table[word]

    return parse


def names(value: Any) -> tuple[str, ...]:
    """("a", "b") from "a,b", ["a", "b"] or ["a,b"]; a JSON list is taken too."""
    parts: list[str] = []
    for item in _items(value):
        if isinstance(item, str) and item.lstrip().startswith("["):
            parts += [text(part) for part in _json(item, list, "a JSON list")]
        else:
            parts += text(item).split(",")
    result = tuple(part.strip() for part in parts if part.strip())
    if not result:
        raise ValueError("expected at least one name")
    return tuple(dict.fromkeys(result))


def counts(value: Any) -> tuple[int, ...]:
    """(1, 2, 8) from "1,2,8", [1, 2, 8] or "[1, 2, 8]": whole numbers from 1 on, in order, each once."""
    one = integer(1)
    return tuple(sorted({one(part) for part in names(value)}))


def pairs(value: Any) -> dict[str, str]:
    """{"op": "name"} from "op=name", ["op=name", ...] or a mapping."""
    if isinstance(value, Mapping):
        return {text(key): text(item) for key, item in value.items()}
    result: dict[str, str] = {}
    for part in names(value):
        key, equals, item = part.partition("=")
        if not (equals and key.strip() and item.strip()):
            raise ValueError(f"expected OP=NAME, got {part!r}; example: linear=reference")
        result[key.strip()] = item.strip()
    return result


def json_object(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    return dict(_json(text(value), dict, "a JSON object"))


def context_length(value: Any) -> int:
    """Tokens; "auto" (or -1, the vLLM family's word for it) is 0: as much as fits."""
    if str(value).lower() in ("auto", "-1"):
        return 0
    return parse_size(value)


def rendezvous(value: Any) -> str:
    """A URL of torch.distributed's kinds; HOST:PORT alone is tcp."""
    word = text(value)
    kind, mark, rest = word.partition("://")
    if not mark and ":" in word:
        return f"tcp://{word}"
    if kind not in ("tcp", "file") or not rest:
        raise ValueError(f"expected HOST:PORT, tcp://HOST:PORT or file:///PATH, got {value!r}")
    return word


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _json(value: str, kind: type, what: str) -> Any:
    try:
        result = json.loads(value)
    except ValueError as error:
        raise ValueError(f"expected {what}, got {value!r} ({error})") from None
    if not isinstance(result, kind):
        raise ValueError(f"expected {what}, got {value!r}")
    return result


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    return {bool: "true or false", list: "a list", dict: "a mapping"}.get(
        type(value), type(value).__name__
    )
