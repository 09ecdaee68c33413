"""What this host's CPU is and how much of it this process may use. Torch-free; every file may be missing.

Cores and memory are the smaller of what the machine has and what affinity and control groups (v1 and v2, the whole
chain of parents) allow. `root` lets tests describe any machine as a small tree of files.
"""

from __future__ import annotations

import os
import platform as host
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# arch names, weakest first; the last one whose flags are all there is the CPU's
X86_ARCHS: tuple[tuple[str, frozenset[str]], ...] = (
    ("portable", frozenset()),
    ("avx2", frozenset({"avx2", "fma"})),
    ("avx512", frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"})),
    ("avx512_bf16", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})),
    ("amx", frozenset({"avx512f", "avx512_bf16", "amx_tile", "amx_bf16"})),
)
ARM_ARCHS: tuple[tuple[str, frozenset[str]], ...] = (
    ("portable", frozenset()),
    ("neon", frozenset({"asimd"})),
    ("neon_i8mm", frozenset({"asimd", "i8mm"})),
    ("neon_bf16", frozenset({"asimd", "i8mm", "bf16"})),
)
# /proc/cpuinfo's flag -> the feature name that implementations ask for
FEATURES = {
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avx512f": "avx512",
    "avx512_vnni": "avx512_vnni",
    "avx_vnni": "avx_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_bf16": "amx_bf16",
    "amx_int8": "amx_int8",
    "asimd": "neon",
    "asimddp": "dotprod",
    "i8mm": "i8mm",
    "bf16": "neon_bf16",
    "sve": "sve",
}
NATIVE_BF16 = frozenset({"avx512_bf16", "amx_bf16", "neon_bf16"})
# What a described CPU of an arch has: enough to explain choices for it.
DESCRIBED = {
    "portable": frozenset[str](),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": frozenset({"avx2", "fma", "f16c", "avx512f", "avx512_vnni"}),
    "avx512_bf16": frozenset({"avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16"}),
    "amx": frozenset(
        {"avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"}
    ),
    "neon": frozenset({"asimd", "asimddp"}),
    "neon_i8mm": frozenset({"asimd", "asimddp", "i8mm"}),
    "neon_bf16": frozenset({"asimd", "asimddp", "i8mm", "bf16"}),
}


def features_of(flags: frozenset[str]) -> frozenset[str]:
    return frozenset(FEATURES[flag] for flag in flags if flag in FEATURES)


def arch_of(flags: frozenset[str]) -> str:
    table = ARM_ARCHS if "asimd" in flags else X86_ARCHS
    return [name for name, needed in table if needed <= flags][-1]


@dataclass(frozen=True, slots=True)
class Limit:
    """A number and where it comes from, for the person who wonders why it is small."""

    value: int
    source: str


class Hardware:
    """Reads one machine's description below `root`. Nothing is kept: every call reads again."""

    def __init__(self, root: Path | str = "/", machine: str | None = None) -> None:
        self.root = Path(root)
        self.machine = machine or host.machine().lower()

    def _text(self, *path: str) -> str:
        try:
            return self.root.joinpath(*path).read_text(errors="replace")
        except (OSError, ValueError):
            return ""

    def _cpuinfo(self) -> list[dict[str, str]]:
        """One table of fields for each processor in /proc/cpuinfo."""
        blocks = []
        for block in self._text("proc/cpuinfo").split("\n\n"):
            pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
            fields = {key.strip(): value.strip() for key, value in pairs}
            if fields:
                blocks.append(fields)
        return blocks

    def flags(self) -> frozenset[str]:
        for fields in self._cpuinfo():
            found = fields.get("flags") or fields.get("Features")
            if found:
                return frozenset(found.split())
        # Every 64-bit Arm has NEON; without /proc (macOS) nothing more is known for sure.
        return frozenset({"asimd"}) if self.machine in ("arm64", "aarch64") else frozenset()

    def name(self) -> str:
        for fields in self._cpuinfo():
            if fields.get("model name"):
                return fields["model name"]
        return host.processor() or self.machine or "CPU"

    # -- cores --------------------------------------------------------------------------------------------------------

    def processors(self) -> set[int]:
        """Logical processors this process may run on."""
        try:
            return set(os.sched_getaffinity(0))
        except (AttributeError, OSError):
            return set(range(os.cpu_count() or 1))

    def physical_cores(self, processors: set[int]) -> int:
        """Distinct cores behind the logical processors: two threads of a core share its vector units."""
        cores: set[tuple[str, ...]] = set()
        by_number = {fields.get("processor", ""): fields for fields in self._cpuinfo()}
        for number in processors:
            topology = f"sys/devices/system/cpu/cpu{number}/topology"
            siblings = self._text(topology, "core_cpus_list") or self._text(
                topology, "thread_siblings_list"
            )
            fields = by_number.get(str(number), {})
            if siblings.strip():
                cores.add((siblings.strip(),))
            elif "core id" in fields:
                cores.add((fields.get("physical id", "0"), fields["core id"]))
            else:
                cores.add((str(number), "alone"))
        return max(1, len(cores))

    def cores(self, processors: set[int] | None = None) -> Limit:
        """Compute threads that make sense: physical cores within affinity, cut to the cgroup's CPU quota."""
        allowed = self.processors() if processors is None else processors
        cores = self.physical_cores(allowed)
        best = Limit(cores, f"{cores} physical cores of {len(allowed)} usable processors")
        quota = self._cpu_quota()
        if quota is not None and int(quota) < best.value:
            # rounded down: a thread beyond the quota makes all of them wait at every barrier
            return Limit(max(1, int(quota)), f"the control group allows {quota:g} CPUs")
        return best

    def _cpu_quota(self) -> float | None:
        quotas = []
        for folder in self._cgroup("cpu"):
            words = self._text(str(folder), "cpu.max").split()
            if not words:
                words = [
                    self._text(str(folder), "cpu.cfs_quota_us").strip(),
                    self._text(str(folder), "cpu.cfs_period_us").strip(),
                ]
            if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
                quotas.append(int(words[0]) / int(words[1]))
        return min(quotas, default=None)

    # -- memory -------------------------------------------------------------------------------------------------------

    def total_memory(self) -> Limit:
        """Bytes: the machine's memory or the control group's limit, whichever is smaller."""
        best = Limit(self._meminfo("MemTotal") or _sysconf_memory("SC_PHYS_PAGES"), "machine")
        for limit, _ in self._memory_groups():
            if not best.value or limit < best.value:
                best = Limit(limit, "control group limit")
        return best

    def free_memory(self) -> Limit:
        """Bytes that can really be used now: available memory, and the room left in every control group."""
        available = self._meminfo("MemAvailable")
        if available is None:
            available = _sysconf_memory("SC_AVPHYS_PAGES") or self.total_memory().value // 2
        best = Limit(available, "available memory")
        for limit, used in self._memory_groups():
            if limit - used < best.value:
                best = Limit(max(0, limit - used), "room left in the control group")
        return best

    def _meminfo(self, key: str) -> int | None:
        for line in self._text("proc/meminfo").splitlines():
            name, _, rest = line.partition(":")
            if name == key and rest.split() and rest.split()[0].isdigit():
                return int(rest.split()[0]) * 1024
        return None

    def _memory_groups(self) -> Iterator[tuple[int, int]]:
        """(limit, bytes in use that cannot simply be dropped) of each control group with a limit."""
        for folder in self._cgroup("memory"):
            for limit_file, used_file, cache_key in (
                ("memory.max", "memory.current", "inactive_file"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            ):
                limit = self._text(str(folder), limit_file).strip()
                if (
                    not limit.isdigit() or int(limit) >= 1 << 60
                ):  # "max", or version 1's way to say it
                    continue
                used = self._text(str(folder), used_file).strip()
                cache = 0
                for line in self._text(str(folder), "memory.stat").splitlines():
                    key, _, value = line.partition(" ")
                    if key == cache_key and value.strip().isdigit():
                        cache = int(value)
                yield int(limit), max(0, int(used) - cache) if used.isdigit() else 0

    def _cgroup(self, controller: str) -> Iterator[Path]:
        """Folders of this process's control group and its parents, relative to the root.

        In a container the path in /proc/self/cgroup may be the host's; its parents up to the mount point then still
        lead to the folder that is visible.
        """
        for line in self._text("proc/self/cgroup").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, group = rest.partition(":")
            if number == "0" and not controllers:
                mount = Path("sys/fs/cgroup")
            elif controller in controllers.split(","):
                mount = Path("sys/fs/cgroup", controller)
            else:
                continue
            path = mount / group.strip().lstrip("/")
            while True:
                yield path
                if path == mount:
                    break
                path = path.parent


def _sysconf_memory(pages: str) -> int:
    try:
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0
