"""Sampling defaults from generation_config.json. Torch-free."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine.server.params import RANGES, SamplingDefaults

log = logging.getLogger("headrace.server")


def read_defaults(path: str) -> SamplingDefaults:
    """`path` "" or unreadable = the built-in defaults. A value out of range is left out and said in the log."""
    values: dict[str, Any] = {}
    for name, value in _load(path).items():
        if name not in SamplingDefaults.__dataclass_fields__ or value is None:
            continue
        least, greatest = RANGES[name]
        kind = int if name == "top_k" else (int, float)
        if (
            isinstance(value, bool)
            or not isinstance(value, kind)
            or not math.isfinite(value)
            or not least <= value <= greatest
        ):
            log.warning("%s: %s %r is out of range and left out", path, name, value)
        else:
            values[name] = value
    return SamplingDefaults(**values)


def _load(path: str) -> dict[str, Any]:
    if not path:
        return {}
    try:
        data = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("%s cannot be read (%s); built-in sampling defaults are used", path, error)
        return {}
    return data if isinstance(data, dict) else {}
