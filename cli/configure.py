"""The first steps of a start: settings from what was typed, and the device. Light, so that an engine starts soon."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.cli.errors import CliError
from headrace.engine.config import env
from headrace.engine.config.flag import Given
from headrace.engine.config.names import all_spellings
from headrace.engine.config.resolve import ConfigError, merge_defaults, resolve, source_of
from headrace.engine.config.settings import EngineConfig
from headrace.platforms.platform import Default
from headrace.platforms.probe import (
    PlatformError,
    ResolvedPlatform,
    describe_device,
    resolve_device,
)


def configure(model: str, given: Sequence[Given], file: str) -> EngineConfig:
    """Settings from the MODEL argument, flags, the YAML file and the environment's key."""
    rows = list(given)
    if model:
        rows.append(Given(all_spellings()["--model"].flag, model, "argument MODEL"))
    try:
        config = resolve(rows, file)
        key = env.read(env.API_KEY)
        if key:
            default = Default((key,), "kept out of the process list")
            config = merge_defaults(
                config, {"server.api_keys": default}, f"environment {env.API_KEY.name}"
            )
    except ConfigError as error:
        raise CliError(str(error)) from None
    if source_of(config, "model.model") is None:
        raise CliError("no model; example: headrace serve demo")
    return config


def find_device(config: EngineConfig, *, described: bool = False) -> ResolvedPlatform:
    """The device of --device; with `described` it may be hardware that is not here."""
    try:
        name = config.device.device
        return describe_device(name) if described else resolve_device(name)
    except PlatformError as error:
        raise CliError(str(error)) from None
