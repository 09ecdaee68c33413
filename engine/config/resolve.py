"""Settings from all their sources: defaults < platform < YAML < flags, each with its provenance. Torch-free.

Nothing here changes a configuration in place: every function returns a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine.config.flag import Given
from headrace.engine.config.flags import FLAGS
from headrace.engine.config.names import setting_paths
from headrace.engine.config.settings import EngineConfig, Provenance
from headrace.engine.config.yaml_file import read_yaml
from headrace.platforms.platform import Default

_BY_PATH = {flag.path: flag for flag in FLAGS}


class ConfigError(ValueError):
    """A setting cannot be used. One sentence: who set it, what is wrong, the way out."""


def resolve(flags: Iterable[Given] = (), file: str | Path = "") -> EngineConfig:
    """The configuration that a YAML file and flags ask for. Raises ConfigError.

    A later `Given` for the same setting wins within its layer; flags win over the file.
    """
    layers: list[Given] = []
    if file:
        layers += _read(file)
    layers += flags
    chosen: dict[str, Provenance] = {}
    for given in layers:
        chosen[given.flag.path] = Provenance(given.flag.path, _parse(given), given.source)
    config = _with(EngineConfig(), chosen.values())
    _check_together(config)
    return config


def merge_defaults(
    config: EngineConfig, proposals: Mapping[str, Default], source: str
) -> EngineConfig:
    """Take a platform's (or model's) proposals, by settings path, where nobody set the value or it was left "auto".

    `source` is written to the provenance: PLATFORM and a name, or what else knows it. A proposal for a setting that
    does not exist, or of the wrong type, is the proposer's mistake and raises ConfigError.
    """
    taken = {row.path for row in config.provenance if row.value != "auto"}
    fresh = []
    for path, default in proposals.items():
        _require(path, source)
        if path not in taken:
            fresh.append(Provenance(path, default.value, source, default.reason))
    return _with(config, fresh)


def get(config: EngineConfig, path: str) -> Any:
    """The value at a dotted path such as "cache.block_size"."""
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


def source_of(config: EngineConfig, path: str) -> Provenance | None:
    """Who set a value; None for a built-in default."""
    return config.source_of(path)


def _read(file: str | Path) -> list[Given]:
    try:
        return read_yaml(Path(file))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _parse(given: Given) -> Any:
    try:
        return given.flag.parser(given.value)
    except ValueError as error:
        raise ConfigError(f"{given.source.removeprefix('file ')}: {error}") from None


def _require(path: str, source: str) -> None:
    if path not in setting_paths():
        raise ConfigError(f"{source} proposes a value for {path}, which is not a setting")


def _with(config: EngineConfig, rows: Iterable[Provenance]) -> EngineConfig:
    """A new configuration with every row's value at its path, type-checked against the settings."""
    rows = list(rows)
    sections: dict[str, dict[str, Any]] = {}
    for row in rows:
        section, _, name = row.path.partition(".")
        sections.setdefault(section, {})[name] = row.value
    changed = {}
    for section, values in sections.items():
        old = getattr(config, section)
        plain = msgspec.to_builtins(old) | values
        try:
            changed[section] = msgspec.convert(plain, type(old))
        except msgspec.ValidationError as error:
            names = ", ".join(f"{section}.{name}" for name in values)
            raise ConfigError(f"{names}: {error}") from None
    provenance = config.provenance + tuple(rows)
    return msgspec.structs.replace(config, **changed, provenance=provenance)


def _name(config: EngineConfig, path: str) -> str:
    """How to call a setting in an error: by what the user wrote, else by its flag."""
    row = source_of(config, path)
    return row.source.removeprefix("flag ") if row else _BY_PATH[path].name


def _check_together(config: EngineConfig) -> None:
    """What no single value shows."""
    cache, device, server = config.cache, config.device, config.server
    if cache.num_blocks and cache.kv_cache_memory:
        raise ConfigError(
            f"{_name(config, 'cache.num_blocks')} and {_name(config, 'cache.kv_cache_memory')} both set the size "
            "of the KV cache; give one of them"
        )
    if device.worker == "inproc" and device.tensor_parallel_size > 1:
        raise ConfigError(
            f"{_name(config, 'device.worker')} inproc runs one device and "
            f"{_name(config, 'device.tensor_parallel_size')} asks for {device.tensor_parallel_size}; "
            "use --worker process"
        )
    for op, implementation in device.force.items():
        if implementation in device.disable or f"{op}={implementation}" in device.disable:
            raise ConfigError(
                f"{op}={implementation} is both forced and disabled; drop one of the two"
            )
    if server.uds and any(source_of(config, f"server.{name}") for name in ("host", "port")):
        raise ConfigError("--uds listens on a Unix socket; drop --host and --port, or drop --uds")
