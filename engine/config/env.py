"""The environment variables headrace reads: one typed table, and the only reader of os.environ. Torch-free.

Settings are not among them: those have flags and a YAML file. What stands here belongs to the machine (where caches
are) or must not appear in a process list (keys).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    parser: Callable[[str], Any]
    default: Any
    doc: str


def _flag(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")


CACHE = Variable(
    "HEADRACE_CACHE",
    Path,
    None,
    "Folder for downloaded models (default: headrace in the user's cache folder).",
)
XDG_CACHE_HOME = Variable(
    "XDG_CACHE_HOME", Path, None, "The user's cache folder (default: ~/.cache)."
)
OFFLINE = Variable("HF_HUB_OFFLINE", _flag, False, "1: never ask the hub; the same as --offline.")
API_KEY = Variable(
    "HEADRACE_API_KEY", str, "", "Key that serve demands and chat, complete and bench send."
)

VARIABLES: tuple[Variable, ...] = (CACHE, XDG_CACHE_HOME, OFFLINE, API_KEY)


def read(variable: Variable, environ: Mapping[str, str] | None = None) -> Any:
    """The variable's value now; its default when it is unset or empty."""
    text = (os.environ if environ is None else environ).get(variable.name, "")
    return variable.parser(text) if text else variable.default


def cache_dir() -> Path:
    """Where headrace keeps downloaded models; not created here."""
    own = read(CACHE)
    if own is not None:
        return Path(own).expanduser()
    base = read(XDG_CACHE_HOME) or Path.home() / ".cache"
    return Path(base) / "headrace"


def tuned_file(device: str) -> Path:
    """Where launch options that `bench tune` measured on a device of this name are looked for."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return cache_dir() / "tuned" / f"{name}.json"


def child_environment(**extra: str) -> dict[str, str]:
    """The environment for a child process: this one's, with `extra` put over it.

    PyTorch imports no vendor's package by itself there: it would take every one that is installed, whatever the
    device, and end where one cannot be imported. The platform that needs one imports it and says what is wrong.
    """
    return {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **extra}
