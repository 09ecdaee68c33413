"""Launch options of shared kernels, and implementations that are faster than those that rank above them, as they were
measured on one kind of device: a JSON file, written by `bench tune`, read when a worker starts. Torch-free.

    {"format": 2, "device": "NVIDIA H200", "triton": "3.6.0", "made": "2026-01-31T12:00:00+00:00",
     "options": {"row LinearQuery(in_features=4096, ...)": {"BLOCK_N": 2, "BLOCK_K": 1024, "num_warps": 2},
                 "paged_attention AttentionQuery(q_heads=32, ...)":
                 {"implementation": "flashinfer", "versions": {"flashinfer-python": "0.7.4"}}}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from headrace.platforms.registry import Requirement, installed_version

FORMAT = 2  # experts over copied tiles want other options than those of format 1
# What may be tuned. Everything else that a kernel is compiled for follows from the query.
NAMES = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLITS", "num_warps", "num_stages")
MOST = 1 << 16
_DISTRIBUTIONS = ("triton", "pytorch-triton-rocm", "pytorch-triton-xpu", "triton-xpu")
_IGNORED = frozenset({"scale"})  # fields of a query that no kernel is compiled for

Options = Mapping[str, Mapping[str, Any]]  # by key()


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a file held. `problem`: why it, or some of it, is not used, a sentence; "" also where there is no file."""

    options: Options = field(default_factory=dict)
    made: str = ""
    problem: str = ""


def key(kernel: str, query: Any, options: Mapping[str, Any]) -> str:
    """Names a kernel at a shape: its query without defaults, and its rows where the same query has several."""
    shape = ", ".join(
        f"{one.name}={getattr(query, one.name)}"
        for one in fields(query)
        if one.name not in _IGNORED and getattr(query, one.name) != one.default
    )
    rows = f" BLOCK_M={options['BLOCK_M']}" if "BLOCK_M" in options else ""
    return f"{kernel} {type(query).__name__}({shape}){rows}"


def choice(name: str, requires: Iterable[Requirement]) -> dict[str, Any]:
    """An entry for key(op, query, {}): this implementation is the faster one, with these packages as installed here."""
    names = [name for need in requires for name in (need.distribution, *need.aliases)]
    versions = {name: found for name in names if (found := installed_version(name))}
    return {"implementation": name, "versions": versions}


def chosen(options: Options, op: str, query: Any) -> str:
    """The implementation that was measured to be faster; "" where none was."""
    found = options.get(key(op, query, {}), {}) if options else {}
    return str(found.get("implementation", ""))


def triton_version() -> str:
    """Of the distribution that brings Triton here; "" without."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def read(path: Path, device: str) -> Tuned:
    """The options of a file, none where it is missing, broken, or made for another device or release of Triton."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Tuned()
    except (OSError, UnicodeDecodeError) as error:
        return _refused(path, str(error))
    try:
        held = json.loads(text)
        if held["format"] != FORMAT:
            return _refused(path, f"it has format {held['format']!r}, this release reads {FORMAT}")
        found = (held["device"], held["triton"])
        options = {name: _checked(values) for name, values in held["options"].items()}
        made = str(held["made"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return _refused(path, f"it is broken ({type(error).__name__}: {error})")
    here = (device, triton_version())
    if found != here:
        what = [
            f"{name} with Triton {version or 'not installed'}" for name, version in (found, here)
        ]
        return _refused(path, f"it was made for {what[0]}, this is {what[1]}")
    stale = {name: why for name, values in options.items() if (why := _stale(values))}
    kept = {name: values for name, values in options.items() if name not in stale}
    problem = _refused(path, next(iter(stale.values())), "a choice").problem if stale else ""
    return Tuned(kept, made, problem)


def _stale(values: Mapping[str, Any]) -> str:
    """Why a choice does not hold here, "" where it does."""
    for name, version in values.get("versions", {}).items():
        found = installed_version(name) or "not installed"
        if found != version:
            return f"{values['implementation']} was measured with {name} {version}, which is {found} here"
    return ""


def write(path: Path, device: str, options: Options) -> None:
    """Adds to what the file holds for this device and release; replaces a file that is not used. OSError."""
    kept = read(path, device).options
    held = {
        "format": FORMAT,
        "device": device,
        "triton": triton_version(),
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "options": {**kept, **options},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    if values.get("implementation"):
        versions = {str(name): str(version) for name, version in values["versions"].items()}
        return {"implementation": str(values["implementation"]), "versions": versions}
    for name, value in values.items():
        if name not in NAMES or type(value) is not int or not 1 <= value <= MOST:
            raise ValueError(f"{name}={value!r}")
    return dict(values)


def _refused(path: Path, why: str, what: str = "what was tuned") -> Tuned:
    return Tuned(
        problem=f"{what} in {path} is not used: {why}; headrace bench tune MODEL makes it anew"
    )
