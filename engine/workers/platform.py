"""The platform a device belongs to, by name. Torch-free."""

from __future__ import annotations

from importlib.metadata import entry_points

from headrace.platforms.platform import Platform


def platform_named(name: str) -> Platform:
    """ValueError when no installed platform has the name."""
    for entry in entry_points(group="headrace.platforms"):
        if entry.name == name:
            return entry.load()()
    raise ValueError(f"platform {name!r} is not installed here")
