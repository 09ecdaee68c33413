"""`headrace doctor`: devices with reasons, versions, memory, and what is missing. Works without torch."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.engine.config import env
from headrace.engine.config.settings import EngineConfig
from headrace.engine.config.sizes import format_bytes
from headrace.engine.weights.demo import DEMO_NAME, demo_file
from headrace.engine.weights.packed import packed_folder, packed_size
from headrace.engine.weights.source import ModelError
from headrace.platforms.device import DeviceInfo
from headrace.platforms.probe import Finding, find_all
from headrace.platforms.registry import installed_version

DEVELOPMENT = ("dev", "test")  # extras that running a server never needs
_REQUIREMENT = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


def run(as_json: bool) -> None:
    found = examine()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    _show(Console(), found)


def examine() -> dict[str, Any]:
    """Everything doctor says, as plain data."""
    packages, platforms = list(_packages()), find_all()
    return {
        "headrace": metadata.version("headrace"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "platforms": [_finding(row) for row in platforms],
        "memory": _memory(),
        "packages": packages,
        "cache": {
            "folder": str(env.cache_dir()),
            "demo": _demo_is_here(),
            "packed": dict(zip(("files", "bytes"), packed_size(), strict=True)),
        },
        "environment": {
            variable.name: "set" if variable is env.API_KEY else str(env.read(variable))
            for variable in env.VARIABLES
            if env.read(variable) != variable.default
        },
        "advice": [*_advice(packages), *_problems(platforms)],
    }


def _finding(row: Finding) -> dict[str, Any]:
    return {
        "name": row.name,
        "reason": row.reason,
        "implementations": sorted(
            f"{one.op}={one.name}"
            for one in (row.platform.implementations() if row.platform else ())
        ),
        "known_archs": list(row.platform.known_archs()) if row.platform else [],
        "devices": [_device(device) for device in row.devices],
    }


def _device(device: DeviceInfo) -> dict[str, Any]:
    return {
        "spec": device.spec,
        "name": device.name,
        "arch": device.arch,
        "memory": device.memory,
        "units": device.units,
        "dtypes": list(device.dtypes),
        "features": sorted(device.features),
        "versions": dict(device.versions),
        "notes": list(device.notes),
    }


def _memory() -> dict[str, int]:
    memory = psutil.virtual_memory()
    return {"total": memory.total, "available": memory.available}


def _packages() -> Iterable[dict[str, Any]]:
    """What headrace's own metadata asks for, extras named, with the version that is here or None."""
    for line in metadata.requires("headrace") or ():
        requirement, _, marker = line.partition(";")
        extra = _EXTRA.search(marker)
        match = _REQUIREMENT.match(requirement)
        if match is None or ("sys_platform" in marker and sys.platform == "win32"):
            continue
        yield {
            "name": match.group(),
            "wanted": requirement.strip().removeprefix(match.group()),
            "extra": extra.group(1) if extra else "",
            "version": installed_version(match.group()),
        }


def _advice(packages: Iterable[dict[str, Any]]) -> Iterable[str]:
    """What is missing and how to get it."""
    missing = [row["name"] for row in packages if row["version"] is None and not row["extra"]]
    if missing:
        yield f"{', '.join(missing)} missing: pip install {' '.join(missing)}"
    for extra in sorted({row["extra"] for row in packages} - {"", *DEVELOPMENT}):
        lacking = [r["name"] for r in packages if r["extra"] == extra and r["version"] is None]
        if lacking:
            yield f"{', '.join(lacking)} not installed (optional): pip install 'headrace[{extra}]'"
    if not _demo_is_here():
        yield f"the demo model is not here yet: headrace serve {DEMO_NAME} downloads it once"


def _problems(platforms: Iterable[Finding]) -> Iterable[str]:
    """What each device's platform says of a start with nothing but defaults."""
    for row in platforms:
        if row.platform is None:
            continue
        for device in row.devices:
            for problem in row.platform.check(EngineConfig(), device):
                yield f"{device.spec}: {problem.text}"


def _demo_is_here() -> bool:
    try:
        demo_file(offline=True)
    except ModelError:
        return False
    return True


def _show(console: Console, found: dict[str, Any]) -> None:
    memory = found["memory"]
    console.print(
        f"headrace {found['headrace']}, Python {found['python']}, {found['system']}",
        highlight=False,
    )
    console.print(
        f"memory: {format_bytes(memory['available'])} free of {format_bytes(memory['total'])}",
        highlight=False,
    )
    console.print(f"models: {found['cache']['folder']}", highlight=False, soft_wrap=True)
    packed = found["cache"]["packed"]
    if packed["files"]:
        console.print(
            f"packed weights (--packed-cache): {packed['files']} files, {format_bytes(packed['bytes'])}; "
            f"to free them: rm -r {packed_folder()}",
            highlight=False,
            soft_wrap=True,
        )
    console.print()
    console.print(_platform_table(found["platforms"]))
    for row in found["platforms"]:
        for device in row["devices"]:
            console.print(
                Text(f"{device['spec']} has {', '.join(device['features']) or 'no features'}")
            )
            for note in device["notes"]:
                console.print(Text(f"  {note}", style="dim"))
    console.print()
    console.print(_package_table(found["packages"]))
    for name, value in found["environment"].items():
        console.print(f"{name} = {value}", highlight=False)
    for text in found["advice"]:
        console.print(Text(f"- {text}", style="yellow"))
    if not found["advice"]:
        console.print(Text("nothing is missing", style="green"))


def _platform_table(platforms: Iterable[dict[str, Any]]) -> Table:
    table = Table("platform", "device", "name", "arch", "memory", "units", "dtypes or reason")
    for row in platforms:
        for device in row["devices"]:
            table.add_row(
                row["name"],
                device["spec"],
                device["name"],
                device["arch"],
                format_bytes(device["memory"]),
                str(device["units"]),
                ", ".join(device["dtypes"]),
            )
        if not row["devices"]:
            table.add_row(row["name"], "-", "", "", "", "", Text(row["reason"], style="yellow"))
    return table


def _package_table(packages: Iterable[dict[str, Any]]) -> Table:
    table = Table("package", "here", "wanted", "for")
    for row in packages:
        if row["extra"] in DEVELOPMENT:
            continue
        here = row["version"] or Text("missing", style="red" if not row["extra"] else "yellow")
        table.add_row(row["name"], here, row["wanted"], row["extra"])
    return table
