"""What `npu-smi` and the files of the driver and of CANN say of Ascend devices: no torch, no context. And what each
generation can do.

Sources: the output of `npu-smi info` of drivers 22.0 to 26.0, the SoC names in libtorch_npu.so, and for what an op runs
on the lists of products in torch_npu's own documentation of it.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.platforms.torch_device.installed import version_of as version_of

GIB = 1 << 30
MIB = 1 << 20

ASCEND = Path("/usr/local/Ascend")
DEVICES = Path("/dev")
SMI_SECONDS = 20.0
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
HOME = "ASCEND_HOME_PATH"  # set by CANN's set_env.sh

# arch -> a typical device of it: name, SoC, GiB. For `--device npu:<arch>` on a machine without one.
DESCRIBED = {
    "310P": ("an Ascend 310P such as half of the Atlas 300I Duo", "Ascend310P3", 44),
    "910B": ("an Ascend 910B such as in the Atlas 800I A2", "Ascend910B3", 64),
    "910C": ("one die of an Ascend 910C such as in the Atlas 800I A3", "Ascend910_9391", 64),
}
# Matrix cores of a chip. The last digit of a 910_93xx says the rest of its variant.
_CORES = {
    "Ascend310P1": 10,
    "Ascend310P3": 8,
    "Ascend910B1": 24,
    "Ascend910B2": 24,
    "Ascend910B2C": 24,
    "Ascend910B3": 20,
    "Ascend910B4": 20,
    "Ascend910B4-1": 20,
    "Ascend910_9362": 20,
    "Ascend910_9372": 20,
    "Ascend910_9381": 24,
    "Ascend910_9382": 24,
    "Ascend910_9391": 24,
    "Ascend910_9392": 24,
}

_ROW = re.compile(r"^\|\s*(\d+)(?:\s+(\S+))?\s*\|\s*(\S+)\s*\|\s*(.*?)\s*\|\s*$")
_PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")
_DRIVER = re.compile(r"\bVersion:\s*(\S+)")
_BUS = re.compile(r"^[0-9A-Fa-f]{4}:")


@dataclass(frozen=True, slots=True)
class Found:
    """One chip as npu-smi lists it, in the order in which CANN numbers them."""

    card: int  # npu-smi's "NPU" and "Chip": what its other commands are told with -i and -c
    chip: int
    name: str  # npu-smi's own: "910B3", "310P3", "Ascend910"
    health: str  # "OK", "Warning", "Alarm", "Critical"
    memory: int  # bytes


class SmiError(RuntimeError):
    """npu-smi is missing or says nothing of use; the text says why and what to do."""


def arch_of(soc: str) -> str:
    """The generation of a SoC, "" for one that is not served."""
    if re.fullmatch(r"Ascend310P\w*", soc):
        return "310P"
    if re.fullmatch(r"Ascend910B\d\w*(-\d)?", soc):
        return "910B"
    return "910C" if re.fullmatch(r"Ascend910_93\d\d", soc) else ""


def features_of(arch: str) -> frozenset[str]:
    """What implementations may ask for.

    "bf16": computes in bfloat16; "fused_attention": the fused attention reads paged KV; "routing": the ops that sort
    tokens by expert and put them back; "rotary_mul": the rotary op of any head size; "add_norm": the fused addition and
    norm; "geglu": the gated GELU; "search": finds places in sorted rows, as sampling does.
    """
    newer = {"bf16", "fused_attention", "routing", "rotary_mul", "add_norm", "geglu", "search"}
    return frozenset(newer if arch in ("910B", "910C") else ())


def dtypes_of(arch: str) -> tuple[str, ...]:
    if "bf16" in features_of(arch):
        return ("bfloat16", "float16", "float32")
    return ("float16", "float32")


def cores_of(soc: str) -> int:
    return _CORES.get(soc, 1)


def device_files() -> str | None:
    """None when the system shows an Ascend device, else the reason why there is none."""
    if not sys.platform.startswith("linux"):
        return "Ascend devices are driven on Linux only"
    if any(re.fullmatch(r"davinci\d+", path.name) for path in DEVICES.glob("davinci*")):
        return None
    if (DEVICES / "davinci_manager").exists():
        return "the Ascend driver is here but no device of it (/dev/davinci0); pass one to the container"
    return "no Ascend device here (/dev/davinci0)"


def smi(*arguments: str) -> str:
    """What npu-smi prints. SmiError when it cannot be asked."""
    try:
        done = subprocess.run(
            ["npu-smi", *arguments], capture_output=True, text=True, timeout=SMI_SECONDS
        )
    except FileNotFoundError:
        raise SmiError(
            "npu-smi is not here, and only it tells 310P, 910B and 910C apart; install the Ascend driver, or mount "
            "/usr/local/bin/npu-smi and /usr/local/Ascend/driver into the container"
        ) from None
    except subprocess.TimeoutExpired:
        raise SmiError(
            f"npu-smi did not answer within {SMI_SECONDS:g} s; see the driver's log"
        ) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise SmiError(f"npu-smi says: {said[-1] if said else 'nothing'} (exit {done.returncode})")
    return done.stdout


def chips(text: str) -> list[Found]:
    """The chips in the table of `npu-smi info`. Each has two rows: card, name and health; chip, bus and memory."""
    found = []
    card: tuple[int, str, str] | None = None
    for line in text.splitlines():
        row = _ROW.match(line)
        if row is None:
            continue
        number, second, third, rest = int(row[1]), row[2] or "", row[3], row[4]
        if not _BUS.match(third):
            card = (number, second, third)
            continue
        # the bus' row: its last pair is the HBM where the chip has one, else the only memory
        pairs = _PAIR.findall(rest)
        if card is not None and pairs:
            found.append(Found(card[0], number, card[1], card[2], int(pairs[-1][1]) * MIB))
        card = None
    return found


def driver_of(text: str) -> str:
    """The driver's version, which `npu-smi info` prints above its table."""
    match = _DRIVER.search(text)
    return match[1] if match else ""


def soc_of(chip: Found) -> str:
    """The SoC name of a chip, e.g. "Ascend910B3". A 910C calls itself Ascend910 like the first Ascend did: which one it
    is, its board says."""
    name = chip.name if chip.name.startswith("Ascend") else f"Ascend{chip.name}"
    if name != "Ascend910":
        return name
    fields = board(smi("info", "-t", "board", "-i", str(chip.card), "-c", str(chip.chip)))
    variant = fields.get("NPU Name", "")
    return f"Ascend910_{variant}" if variant else "Ascend910"


def board(text: str) -> dict[str, str]:
    """The lines "Name : value" of `npu-smi info -t board`."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, sep, value in pairs if sep}


def visible(count: int) -> list[int]:
    """Which chips CANN lets this process see, in its order: all, or those of ASCEND_RT_VISIBLE_DEVICES up to the first
    that does not exist."""
    asked = os.environ.get(VISIBLE, "")
    if not asked.strip():
        return list(range(count))
    seen: list[int] = []
    for part in asked.split(","):
        if not part.strip().isdigit() or int(part) >= count or int(part) in seen:
            break
        seen.append(int(part))
    return seen


def cann_version() -> str:
    """The version of the CANN whose environment is set, else of the one in its usual place; "" without any."""
    for folder in _cann_folders():
        for file in (
            folder / f"{platform.machine()}-linux" / "ascend_toolkit_install.info",
            folder / "ascend_toolkit_install.info",
        ):
            if version := _fields(file).get("version", ""):
                return version
    return ""


def environment_set() -> bool:
    """Whether CANN's set_env.sh was sourced: torch_npu finds CANN's libraries by it."""
    return bool(os.environ.get(HOME))


def driver_version() -> str:
    """By the driver's own file, for containers whose npu-smi hides it."""
    return _fields(ASCEND / "driver" / "version.info").get("version", "")


def _cann_folders() -> Iterator[Path]:
    if home := os.environ.get(HOME):
        yield Path(home)
    yield ASCEND / "cann"
    yield ASCEND / "ascend-toolkit" / "latest"


def _fields(file: Path) -> Mapping[str, str]:
    """The lines "name=value" of a file, names in lower case; nothing when it cannot be read."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines)
    return {name.strip().lower(): value.strip() for name, sep, value in pairs if sep}
