"""What Linux says of AMD's devices (/dev/kfd and its topology in sysfs): no torch, no library. And what each
architecture can do.

Sources: the kernel's Documentation/ABI for sysfs-class-kfd and ROCm's documentation of HIP_VISIBLE_DEVICES.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.platforms.torch_device.installed import torch_built_for
from headrace.platforms.torch_device.installed import version_of as version_of

GIB = 1 << 30

KFD = Path("/dev/kfd")
NODES = Path("/sys/class/kfd/kfd/topology/nodes")
RENDER = Path("/sys/class/drm")
ROCM = Path("/opt/rocm/.info/version")

_FRAME_BUFFER = (1, 2)  # heap types of memory on the device, seen by the host or not

# arch -> a typical device of it: name, GiB, compute units. For `--device rocm:<arch>` on a machine without one.
DESCRIBED = {
    "gfx90a": ("an AMD CDNA 2 GPU such as one half of the MI250X", 64, 110),
    "gfx942": ("an AMD CDNA 3 GPU such as the MI300X", 192, 304),
    "gfx950": ("an AMD CDNA 4 GPU such as the MI355X", 288, 256),
    "gfx1100": ("an AMD RDNA 3 GPU such as the RX 7900 XTX", 24, 96),
    "gfx1201": ("an AMD RDNA 4 GPU such as the RX 9070 XT", 16, 64),
}

# The package of Triton goes by one of these names, by who built it.
TRITON_NAMES = ("triton", "triton-rocm", "pytorch-triton-rocm")
AITER = "amd-aiter"


@dataclass(frozen=True, slots=True)
class Found:
    """One device as the kernel lists it, in the order in which HIP numbers them."""

    name: str
    arch: str
    memory: int  # bytes
    units: int
    wave: int  # lanes of a wave
    uuid: str = ""  # "GPU-0123456789abcdef"


class TopologyError(RuntimeError):
    """The kernel driver shows no usable device; the text says why and what to do."""


def arch_of(version: int) -> str:
    """gfx90a for 90010: the decimal pairs are major, minor and stepping."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def family(arch: str) -> str:
    """The generation that an architecture belongs to, "" for those that the kernels cannot serve."""
    if arch in ("gfx908", "gfx90a", "gfx942", "gfx950"):
        return {"gfx908": "cdna1", "gfx90a": "cdna2", "gfx942": "cdna3", "gfx950": "cdna4"}[arch]
    generations = (
        ("gfx103", "rdna2"),
        ("gfx110", "rdna3"),
        ("gfx115", "rdna3"),
        ("gfx120", "rdna4"),
    )
    return next((name for prefix, name in generations if arch.startswith(prefix)), "")


def wave_of(arch: str) -> int:
    return 64 if arch.startswith("gfx9") else 32


def shared_memory(arch: str) -> int:
    """Bytes of LDS that one workgroup may have."""
    return 160 * 1024 if arch == "gfx950" else 64 * 1024


def features_of(arch: str) -> frozenset[str]:
    """What kernels may ask for.

    "mfma", "wmma": the kind of matrix instructions; "wave64", "wave32": lanes of a wave; "lds160" and "lds64": KiB
    of shared memory for a workgroup; "fp8": products of 8-bit floats, "fp8_fnuz" where these are the variant without
    a negative zero and with half the range (their bytes mean other numbers than OCP's).
    """
    kind = family(arch)
    found = {f"wave{wave_of(arch)}", f"lds{shared_memory(arch) // 1024}", "bf16"}
    if kind.startswith("cdna"):
        found.add("mfma")
    if kind in ("rdna3", "rdna4"):
        found.add("wmma")
    if kind in ("cdna3", "cdna4", "rdna4"):
        found.add("fp8")
    if kind == "cdna3":
        found.add("fp8_fnuz")
    return frozenset(found)


def dtypes_of(arch: str) -> tuple[str, ...]:
    if family(arch) == "rdna2":  # has no products of bfloat16: they would be made of float32 ones
        return ("float16", "bfloat16", "float32")
    return ("bfloat16", "float16", "float32")


def device_files() -> str | None:
    """None when the system shows an AMD compute device, else the reason why there is none."""
    if not sys.platform.startswith("linux"):
        return "AMD devices are driven on Linux only"
    if not KFD.exists():
        return "no AMD compute device here (/dev/kfd)"
    if not os.access(KFD, os.R_OK | os.W_OK):
        return (
            "/dev/kfd is there but may not be opened; add the user to the groups that own it and /dev/dri/renderD* "
            "(usually render and video), or give the container --device /dev/kfd --device /dev/dri"
        )
    return None


def _properties(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in path.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _memory(node: Path, render: Path) -> int:
    banks = [_properties(path) for path in sorted(node.glob("mem_banks/*/properties"))]
    own = sum(bank["size_in_bytes"] for bank in banks if bank.get("heap_type") in _FRAME_BUFFER)
    if own:
        return own
    try:  # an APU: its share of the machine's memory
        return int((render / "mem_info_vram_total").read_text())
    except (OSError, ValueError):
        return 0


def _name(node: Path, render: Path, arch: str) -> str:
    for path in (render / "product_name", node / "name"):
        try:
            name = path.read_text().strip()
        except OSError:
            continue
        if name and name != "ip discovery":
            return name if name.upper().startswith("AMD") else f"AMD {name}"
    return f"AMD {arch}"


def _node(node: Path) -> Found | None:
    """The device of a node; None for processors, and for devices that a container was not given."""
    try:
        facts = _properties(node / "properties")
    except PermissionError:
        return None
    if not facts.get("simd_count") or not facts.get("gfx_target_version"):
        return None
    arch = arch_of(facts["gfx_target_version"])
    render = RENDER / f"renderD{facts.get('drm_render_minor', 0)}" / "device"
    unique = facts.get("unique_id", 0)
    return Found(
        _name(node, render, arch),
        arch,
        _memory(node, render),
        facts["simd_count"] // (facts.get("simd_per_cu") or 1),
        facts.get("wave_front_size") or wave_of(arch),
        f"GPU-{unique:016x}" if unique else "",
    )


def _visible(found: list[Found], named: str) -> list[Found]:
    """Those that a list of indices and UUIDs leaves, in its order; it ends at the first entry that means nothing."""
    kept: list[Found] = []
    for entry in named.split(","):
        entry = entry.strip()
        if entry.isdigit() and int(entry) < len(found):
            device = found[int(entry)]
        else:
            same = [one for one in found if one.uuid and one.uuid.lower() == entry.lower()]
            if not same:
                break
            device = same[0]
        if device not in kept or not device.uuid:
            kept.append(device)
    return kept


def devices(environment: Mapping[str, str] | None = None) -> list[Found]:
    """All devices that the environment leaves visible. TopologyError with the reason when sysfs cannot be read."""
    environment = os.environ if environment is None else environment
    try:
        nodes = sorted((path for path in NODES.iterdir() if path.name.isdigit()), key=_number)
    except OSError as error:
        raise TopologyError(
            f"the amdgpu driver's topology cannot be read: {error}; is the amdgpu module loaded?"
        ) from error
    found = [device for path in nodes if (device := _node(path)) is not None]
    # the runtime below HIP filters first; HIP then counts what is left
    for names in (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")):
        named = next((environment[name] for name in names if name in environment), None)
        if named is not None:
            found = _visible(found, named)
    return found


def _number(path: Path) -> int:
    return int(path.name)


def override(environment: Mapping[str, str] | None = None) -> str:
    """The architecture that HSA_OVERRIDE_GFX_VERSION ("11.0.0") makes every device pass for; "" without."""
    environment = os.environ if environment is None else environment
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", environment.get("HSA_OVERRIDE_GFX_VERSION", ""))
    if not match:
        return ""
    major, minor, step = (int(part) for part in match.groups())
    return arch_of(major * 10000 + minor * 100 + step)


def torch_hip() -> str:
    """The HIP version that the installed torch was built for, "" without."""
    return torch_built_for("hip")


def rocm_version() -> str:
    try:
        return ROCM.read_text().strip()
    except OSError:
        return ""
