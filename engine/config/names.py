"""Looks up names in the flag table, however they are spelled, and finds the nearest for a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headrace.engine.config.flag import Flag
from headrace.engine.config.flags import FLAGS, NOT_SUPPORTED
from headrace.engine.config.settings import EngineConfig


@dataclass(frozen=True, slots=True)
class Spelling:
    """What a typed name means: a flag, or the negative of a switch."""

    flag: Flag
    negative: bool = False


def negative_name(flag: Flag) -> str:
    return "--no-" + flag.name.removeprefix("--")


def spellings(flag: Flag) -> dict[str, Spelling]:
    """Every name of a flag as typed on the command line."""
    result = {name: Spelling(flag) for name in (flag.name, *flag.aliases)}
    if flag.kind == "switch":
        for name in (flag.name, *flag.aliases):
            result["--no-" + name.removeprefix("--")] = Spelling(flag, negative=True)
        result |= {name: Spelling(flag, negative=True) for name in flag.negatives}
    return result


def all_spellings(flags: Iterable[Flag] = FLAGS) -> dict[str, Spelling]:
    return {name: spelling for flag in flags for name, spelling in spellings(flag).items()}


def normalise(name: str) -> str:
    """--max_model_len -> --max-model-len; one-dash names (-tp) stay."""
    return name.replace("_", "-") if name.startswith("--") else name


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like `name`, or ""."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return close[0] if close else ""


def unknown_name(name: str, known: Iterable[str]) -> str:
    """One sentence about a name that no row has: refused with its reason, or the nearest that exists."""
    for row in NOT_SUPPORTED:
        if row.name == normalise(name):
            return f"{name} is not supported: {row.reason}"
    guess = nearest(normalise(name), known)
    return f"unknown option {name}" + (f"; did you mean {guess}?" if guess else "")


def setting_paths() -> list[str]:
    """Every settings path, e.g. "model.dtype"."""
    default = EngineConfig()
    sections = [name for name in EngineConfig.__struct_fields__ if name != "provenance"]
    return [
        f"{name}.{field}" for name in sections for field in getattr(default, name).__struct_fields__
    ]


def setting_default(path: str) -> Any:
    """The built-in default at a path."""
    section, _, field = path.partition(".")
    return getattr(getattr(EngineConfig(), section), field)
