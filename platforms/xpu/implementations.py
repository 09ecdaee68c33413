"""What can serve on Intel GPUs: metadata and verdicts. Imports neither torch nor a vendor's library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from headrace.platforms.device import DeviceInfo
from headrace.platforms.registry import Check, Implementation, Verdict
from headrace.platforms.triton import rows
from headrace.platforms.xpu.hardware import FAMILIES, TRITON_NAMES

# Families on which the contract tests were run by the project: none so far.
VERIFIED: frozenset[str] = frozenset()
HOST = "host"


def implementations(source: str) -> Iterable[Implementation]:
    for row in rows.implementations(source, _triton, TRITON_NAMES):
        yield replace(row, supports=_triton_sample) if row.op == "sample" else row
    yield Implementation(
        "sample",
        HOST,
        "headrace.platforms.xpu.sampling:HostSample",
        rank=10,
        supports=_host_sample,
        source=source,
        per_query=True,
    )


def known(check: Check, device: DeviceInfo) -> Check:
    """What is true of all kernels on this device."""
    check.need(device.arch in FAMILIES, f"the kernels do not serve {device.arch}")
    if device.arch not in VERIFIED:
        check.doubt(f"the project has not run it on {device.arch}")
    return check


def _triton(check: Check, device: DeviceInfo) -> Check:
    # a described device has no versions: only what is required is asked of it
    has = not device.versions or "triton" in device.versions
    return known(check.need(has, "the installed Triton has no backend for Intel GPUs"), device)


def _triton_sample(query: Any, device: DeviceInfo) -> Verdict:
    check = _triton(Check(), device)
    check.need(
        "fp64" in device.features, f"{device.arch} has no float64, in which masses are summed"
    )
    return check.verdict()


def _host_sample(query: Any, device: DeviceInfo) -> Verdict:
    """No doubt here: what runs is the reference, and it runs on the host."""
    check = Check().need("fp64" not in device.features, f"{device.arch} can draw tokens itself")
    return check.note(
        f"{device.arch} has no float64: the host draws from a copy of the logits"
    ).verdict()
