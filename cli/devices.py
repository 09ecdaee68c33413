"""The device a command runs on: probed, named or described. (Thin: platforms/probe.py does the work.)"""

from __future__ import annotations

from headrace.cli.errors import CliError
from headrace.engine.workers.platform import platform_named
from headrace.platforms.device import DeviceInfo
from headrace.platforms.platform import Platform


def find_device(name: str, described: bool) -> tuple[Platform, DeviceInfo, bool]:
    kind, _, arch = name.partition(":")
    try:
        platform = platform_named("cpu" if kind == "auto" else kind)
        if described and arch and not arch.isdigit():
            return platform, platform.describe(arch), False
    except ValueError as error:
        raise CliError(str(error)) from None
    return platform, platform.probe()[0], True
