"""What Linux and Level Zero say of Intel's GPUs: no torch, no context. And what each family can do.

Sources: device ids from Linux' include/drm/intel/pciids.h; structures and codes from Level Zero's ze_api.h.
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
INTEL = 0x8086
DRIVERS = ("i915", "xe")

# The package of Triton with Intel's backend, by who built it and when; "triton" with "+xpu" in its version.
TRITON_NAMES = ("triton-xpu", "pytorch-triton-xpu", "triton")
IPEX = "intel-extension-for-pytorch"
GRAPHS_SINCE = (2, 11)  # the release of torch that brought torch.xpu.XPUGraph


@dataclass(frozen=True, slots=True)
class Family:
    """One generation of GPUs and a typical device of it, for `--device xpu:<name>` on a machine without one.

    Features are what kernels may ask for: "xmx" matrix units, "xmx16" those that take sub-groups of 16 lanes, "bf16" in
    them, "block_2d" loads of two-dimensional tiles, "fp64", and "integrated": its memory is the machine's.
    """

    title: str
    memory: int  # GiB
    units: int  # Xe cores
    features: frozenset[str]
    ids: tuple[int, ...] = ()


_XE2 = frozenset({"xmx", "xmx16", "bf16", "block_2d", "fp64"})
_XE_LPG = frozenset({"fp64", "integrated"})
FAMILIES: Mapping[str, Family] = {
    "pvc": Family(
        "a data center GPU such as one half of the Max 1550", 64, 64, _XE2,
        (0x0B69, 0x0B6E, *range(0x0BD4, 0x0BDC), 0x0BE0, 0x0BE1, 0x0BE5),
    ),
    "bmg": Family(
        "an Arc B GPU such as the B580", 12, 20, _XE2,
        (
            0xE202, 0xE209, 0xE20B, 0xE20C, 0xE20D, 0xE210, 0xE211, 0xE212, 0xE216,
            *range(0xE220, 0xE224),
        ),
    ),
    "ptl": Family(
        "the GPU of a Core Ultra 300, with memory shared", 32, 12, _XE2 | {"integrated"},
        (*range(0xB080, 0xB088), 0xB08F, 0xB090, 0xB0A0, 0xB0B0, 0xFD80, 0xFD81),
    ),
    "lnl": Family(
        "the GPU of a Core Ultra 200V, with memory shared", 32, 8, _XE2 | {"integrated"},
        (0x6420, 0x64A0, 0x64B0),
    ),
    "dg2": Family(
        "an Arc A GPU such as the A770", 16, 32, frozenset({"xmx", "bf16"}),
        (
            *range(0x5690, 0x5698), *range(0x56A0, 0x56A7), *range(0x56B0, 0x56B4),
            *range(0x56BA, 0x56C0), 0x56C0, 0x56C1, 0x56C2,
        ),
    ),
    "arl": Family(
        "the GPU of a Core Ultra 200H, with memory shared", 32, 8, _XE_LPG | {"xmx", "bf16"},
        (0x7D51, 0x7DD1),
    ),
    "mtl": Family(
        "the GPU of a Core Ultra 100, with memory shared", 32, 8, _XE_LPG,
        # the last three are sold as Core Ultra 200U and 200S: Arrow Lake with the GPU of the generation before
        (0x7D40, 0x7D45, 0x7D55, 0x7D60, 0x7DD5, 0x7D41, 0x7D67, 0xB640),
    ),
}  # fmt: skip
OTHER = "other"  # an Intel GPU of none of these families


def family_of(device_id: int) -> str:
    return next((name for name, family in FAMILIES.items() if device_id in family.ids), OTHER)


def features_of(arch: str) -> frozenset[str]:
    return FAMILIES[arch].features if arch in FAMILIES else frozenset()


def dtypes_of(arch: str) -> tuple[str, ...]:
    """Arc A comes with float16 first: its bfloat16 is known to lose accuracy with PyTorch's kernels."""
    if "bf16" in features_of(arch) and arch != "dg2":
        return ("bfloat16", "float16", "float32")
    return ("float16", "bfloat16", "float32")


# -- what the kernel shows --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Node:
    """A render node of an Intel GPU."""

    path: str  # "/dev/dri/renderD128"
    driver: str  # "xe", "i915" or what else drives it
    device_id: int
    address: str  # on the PCI bus, "0000:03:00.0"
    present: bool  # the file is there
    usable: bool  # and may be opened

    @property
    def label(self) -> str:
        return f"Intel GPU {self.device_id:04x} ({family_of(self.device_id)}) at {self.address}"


def nodes(root: Path = Path("/")) -> list[Node]:
    """Every Intel GPU that sysfs shows, by render node. `root` lets tests describe any machine."""
    found = []
    for entry in sorted((root / "sys/class/drm").glob("renderD*")):
        device = entry / "device"
        if _number(device / "vendor") != INTEL:
            continue
        file = root / "dev/dri" / entry.name
        driver = device / "driver"
        found.append(
            Node(
                f"/dev/dri/{entry.name}",
                driver.resolve().name if driver.exists() else "",
                _number(device / "device"),
                device.resolve().name,
                file.exists(),
                os.access(file, os.R_OK | os.W_OK),
            )
        )
    return found


def _number(path: Path) -> int:
    try:
        return int(path.read_text().strip(), 16)
    except (OSError, ValueError):
        return 0


def device_files(root: Path = Path("/")) -> str | None:
    """None when a usable Intel GPU may be here, else the reason why there is none and the way out."""
    if sys.platform == "win32":
        return None  # there are no device files to look at: the driver's library will say
    if not sys.platform.startswith("linux"):
        return "Intel GPUs are driven on Linux and Windows only"
    found = nodes(root)
    if not found:
        if (root / "dev/dxg").exists():
            return (
                None  # Windows' subsystem for Linux: no render nodes, but the library may find one
            )
        return "no Intel GPU here (a render node in /dev/dri of vendor 8086)"
    driven = [node for node in found if node.driver in DRIVERS]
    if not driven:
        return f"{found[0].label} is driven by {found[0].driver or 'nothing'}, not by i915 or xe"
    if any(node.usable for node in driven):
        return None
    first = driven[0]
    if not first.present:
        return f"{first.label} is here but not {first.path}; give the container --device /dev/dri"
    return (
        f"{first.label} is here but {first.path} may not be opened; add the user to the group that owns it "
        "(usually render)"
    )


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(available, total) bytes of the machine's memory, which integrated GPUs share; zeros where it is not said."""
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return 0, 0
    sizes = {
        match[1]: 1024 * int(match[2])
        for match in re.finditer(r"^(MemTotal|MemAvailable):\s*(\d+) kB", text, re.MULTILINE)
    }
    return sizes.get("MemAvailable", 0), sizes.get("MemTotal", 0)


# -- what is installed ------------------------------------------------------------------------------------------------


def torch_xpu() -> str:
    """The toolkit version that the installed torch was built for XPU with, "" without."""
    return torch_built_for("xpu")


def triton_version() -> str:
    """The version of the installed Triton that has Intel's backend; "" where there is none or another vendor's."""
    own = version_of(*TRITON_NAMES[:2])
    plain = version_of(TRITON_NAMES[2])
    return own or (plain if "xpu" in plain else "")


def release(version: str) -> tuple[int, ...]:
    """(2, 11, 0) for "2.11.0+xpu"."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
