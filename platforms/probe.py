"""Finding platforms and devices. Torch-free; a platform that crashes becomes a reason, never a dead parent.

Platforms register by the entry point group "headrace.platforms" (name = module:Class). Cheap facts come first
(`plausible`), then `python -m headrace.platforms.probe NAME` runs `probe` in a process of its own with a time limit,
unless the platform says that its probe loads no vendor library.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass
from importlib import metadata

from headrace.platforms.device import DeviceInfo
from headrace.platforms.platform import API_VERSION, Platform
from headrace.platforms.registry import Registry

GROUP = "headrace.platforms"
PROBE_SECONDS = 30.0


class PlatformError(RuntimeError):
    """No such platform or device, or it cannot be used. One sentence with the way out."""


@dataclass(frozen=True, slots=True)
class ResolvedPlatform:
    """The device to run on. `others`: a line for each platform or device that was not chosen, and why."""

    platform: Platform
    device: DeviceInfo
    devices: tuple[DeviceInfo, ...]  # all of the platform's, the chosen one among them
    others: tuple[str, ...] = ()

    def registry(self) -> Registry:
        return Registry.with_reference(self.platform.implementations())


@dataclass(frozen=True, slots=True)
class Finding:
    """What looking for one platform's devices gave: devices, or why there are none."""

    name: str
    platform: Platform | None
    devices: tuple[DeviceInfo, ...] = ()
    reason: str = ""


def installed_platforms(only: Collection[str] = ()) -> list[str]:
    """Names of registered platforms, or those of `only` among them. Imports none."""
    names = {entry.name for entry in metadata.entry_points(group=GROUP)}
    return sorted(names & set(only) if only else names)


def load_platform(name: str) -> Platform:
    """The platform by its name, for workers and for `explain`. PlatformError when it is missing or unfit."""
    entries = [entry for entry in metadata.entry_points(group=GROUP) if entry.name == name]
    if not entries:
        raise _unknown(name, installed_platforms())
    try:
        cls = entries[0].load()
    except Exception as error:  # a plugin may fail in any way while it is imported
        raise PlatformError(f"platform {name!r} cannot be imported: {_text(error)}") from error
    version = getattr(cls, "api_version", None)
    if version != API_VERSION:
        raise PlatformError(
            f"platform {name!r} was built for platform API {version}, this is {API_VERSION}; "
            "install matching releases of headrace and the plugin"
        )
    platform: Platform = cls()
    return platform


def find(name: str, timeout: float = PROBE_SECONDS) -> Finding:
    """Look for one platform's devices."""
    try:
        platform = load_platform(name)
    except PlatformError as error:
        return Finding(name, None, reason=str(error))
    try:
        reason = platform.plausible()
        if reason:
            return Finding(name, platform, reason=reason)
        devices = platform.probe() if platform.safe_probe else _probe_apart(name, timeout)
    except Exception as error:  # whatever a driver throws is the reason why it is not used
        return Finding(name, platform, reason=f"probe failed: {_text(error)}")
    return Finding(name, platform, tuple(devices), "" if devices else "no device found")


def find_all(only: Collection[str] = (), timeout: float = PROBE_SECONDS) -> list[Finding]:
    """Findings of every platform, the preferred one first; what `doctor` shows."""
    findings = [find(name, timeout) for name in installed_platforms(only)]
    return sorted(findings, key=lambda f: (-f.platform.priority if f.platform else 0, f.name))


def resolve_device(
    spec: str = "auto", only: Collection[str] = (), timeout: float = PROBE_SECONDS
) -> ResolvedPlatform:
    """The device that "auto", "cpu" or "name:index" means. `only` limits which platforms are looked at at all."""
    name, _, index = spec.partition(":")
    if name != "auto":
        return _resolve_named(name, index, only, timeout)
    findings = find_all(only, timeout)
    for finding in findings:
        if finding.platform is not None and finding.devices:
            others = [
                f"{other.name}: {other.reason or 'not preferred over ' + finding.name}"
                for other in findings
                if other is not finding
            ]
            others += [f"{device.spec}: not the first device" for device in finding.devices[1:]]
            return ResolvedPlatform(
                finding.platform, finding.devices[0], finding.devices, tuple(others)
            )
    why = "; ".join(f"{finding.name}: {finding.reason}" for finding in findings)
    raise PlatformError(f"no device to run on ({why or 'no platform is installed'})")


def _resolve_named(
    name: str, index: str, only: Collection[str], timeout: float
) -> ResolvedPlatform:
    if name not in installed_platforms(only):
        raise _unknown(name, installed_platforms(only))
    finding = find(name, timeout)
    if finding.platform is None or not finding.devices:
        raise PlatformError(f"device {name!r} cannot be used: {finding.reason}")
    by_index = {str(device.index): device for device in finding.devices}
    device = by_index.get(index) if index else finding.devices[0]
    if device is None:
        known = ", ".join(found.spec for found in finding.devices)
        raise PlatformError(f"there is no device {name}:{index}; there are: {known}")
    others = tuple(
        f"{found.spec}: not asked for" for found in finding.devices if found is not device
    )
    return ResolvedPlatform(finding.platform, device, finding.devices, others)


def describe_device(spec: str) -> ResolvedPlatform:
    """A device that need not be here, e.g. "cpu:avx2"; "cpu" or "cpu:0" means the one that is."""
    name, _, arch = spec.partition(":")
    if not arch or arch.isdigit():
        return resolve_device(spec)
    platform = load_platform(name)
    try:
        device = platform.describe(arch)
    except ValueError as error:
        raise PlatformError(str(error)) from error
    return ResolvedPlatform(platform, device, (device,))


def _probe_apart(name: str, timeout: float) -> list[DeviceInfo]:
    """Run `probe` in a process of its own. The search path goes along, so that it finds the same plugins."""
    command = [sys.executable, "-m", "headrace.platforms.probe", name]
    try:
        done = subprocess.run(
            command, input=json.dumps(sys.path), capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise PlatformError(f"no answer within {timeout:g} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        raise PlatformError(f"{said[-1] if said else 'it said nothing'} ({how})")
    return [_device(fields) for fields in json.loads(lines[-1])]


def _device(fields: dict[str, object]) -> DeviceInfo:
    fields["features"] = frozenset(fields["features"])  # type: ignore[call-overload]
    for key in ("dtypes", "notes"):
        fields[key] = tuple(fields[key])  # type: ignore[arg-type]
    return DeviceInfo(**fields)  # type: ignore[arg-type]


def _unknown(name: str, installed: Collection[str]) -> PlatformError:
    names = ", ".join(installed) or "none"
    return PlatformError(f"no platform named {name!r} in this installation; installed: {names}")


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def main() -> None:
    """The child: search path on stdin, devices as JSON on the last line of stdout."""
    sys.path[:] = json.loads(sys.stdin.read())
    devices = load_platform(sys.argv[1]).probe()
    print(json.dumps([asdict(device) for device in devices], default=sorted))


if __name__ == "__main__":
    main()
