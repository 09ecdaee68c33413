"""The rows that a platform with a library for torch.distributed brings. Imports nothing but contracts."""

from __future__ import annotations

from collections.abc import Callable

from headrace.platforms.collectives import OP
from headrace.platforms.device import DeviceInfo
from headrace.platforms.queries import GroupQuery
from headrace.platforms.registry import Check, Implementation, Requirement, Verdict

Judge = Callable[[GroupQuery, DeviceInfo, Check], Check]
NCCL = "headrace.platforms.torch_device.collectives:NcclCollectives"


def _any(query: GroupQuery, device: DeviceInfo, check: Check) -> Check:
    return check


def collectives(
    source: str,
    name: str,
    target: str,
    judge: Judge = _any,
    *,
    rank: int = 50,
    requires: tuple[Requirement, ...] = (),
) -> Implementation:
    """Collectives of the platform named `source`. None ran on several devices of any kind: no row is verified."""

    def supports(query: GroupQuery, device: DeviceInfo) -> Verdict:
        check = Check().doubt("the project has not run it on several devices")
        return judge(query, device, check).verdict()

    return Implementation(
        OP, name, target, rank=rank, requires=requires, supports=supports, source=source
    )
