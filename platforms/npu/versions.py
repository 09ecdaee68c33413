"""Which CANN a torch_npu needs, and which driver a CANN: the vendor's tables, and sentences "have X, need Y".

Sources: COMPATIBILITY.md and README of Ascend's PyTorch repository (torch_npu and CANN), the release notes of CANN
8.5.0 and 9.1.0 (CANN and Ascend HDK, whose version is the driver's). Only the releases for the torch that headrace
asks for (2.9 and later) are here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from headrace.platforms.platform import Problem

# torch_npu -> the CANN it was released with. An older one may do (the vendor lists some as compatible) but lacks ops.
CANN_OF = {
    "2.9.0": "8.5.0",
    "2.9.0.post2": "9.0.0",
    "2.9.0.post6": "9.1.0",
    "2.9.0.post8": "9.1.0",
    "2.10.0": "9.0.0",
    "2.10.0.post4": "9.1.0",
    "2.10.0.post6": "9.1.0",
    "2.11.0": "9.1.0",
    "2.11.0.post2": "9.1.0",
    "2.12.0": "9.1.0",
    "2.12.0.post2": "9.1.0",
}
# CANN -> the oldest driver it runs on
DRIVER_OF = {"8.5": "25.0", "9.0": "25.0", "9.1": "25.2"}

TORCH, TORCH_NPU, CANN, DRIVER = "torch", "torch-npu", "CANN", "driver"
SOURCE = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"


def numbers(version: str) -> tuple[int, ...]:
    """(8, 5, 0) for "8.5.0", (25, 0) for "25.0.rc1.b020": what comes before the first part that is not a number."""
    found = []
    for part in version.split("."):
        if not re.fullmatch(r"\d+", part):
            break
        found.append(int(part))
    return tuple(found)


def cann_needed(torch_npu: str) -> str:
    """The CANN of the table's entry for this torch_npu, or of the last one before it with the same torch; "" for a
    torch_npu that the table does not know."""
    release = _release(torch_npu)
    same = [row for row in CANN_OF if _release(row)[0] == release[0] and _release(row) <= release]
    return CANN_OF[max(same, key=_release)] if same else ""


def missing_torch_npu(torch: str) -> str:
    """What to say when torch_npu is not there."""
    base = ".".join(str(n) for n in numbers(torch.partition("+")[0])[:3])
    need = f"torch-npu=={base}.*" if base else "torch-npu"
    return f"have {TORCH} {torch or 'none'} and no {TORCH_NPU}, need {need}: pip install '{need}'"


def problems(found: Mapping[str, str]) -> list[Problem]:
    """What does not fit together. `found` has what of TORCH, TORCH_NPU, CANN and DRIVER is here."""
    torch, torch_npu = found.get(TORCH, ""), found.get(TORCH_NPU, "")
    cann, driver = found.get(CANN, ""), found.get(DRIVER, "")
    if not torch_npu:
        return [Problem("error", missing_torch_npu(torch))]
    said = []
    if numbers(torch.partition("+")[0])[:2] != numbers(torch_npu)[:2]:
        base = ".".join(str(n) for n in numbers(torch_npu)[:3])
        text = f"have {TORCH} {torch or 'none'} with {TORCH_NPU} {torch_npu}, need {TORCH} {base}: "
        text += f"pip install 'torch=={base}.*', or the {TORCH_NPU} of your torch"
        said.append(Problem("error", text))
    need = cann_needed(torch_npu)
    if not cann:
        wanted = f"CANN {need} or newer" if need else "the CANN that its release notes name"
        text = f"have no CANN, need {wanted} for {TORCH_NPU} {torch_npu}: install its toolkit and ops, then {SOURCE}"
        said.append(Problem("error", text))
    elif need and numbers(cann)[:2] < numbers(need)[:2]:
        text = f"have CANN {cann}, need {need} or newer for all ops of {TORCH_NPU} {torch_npu}: update CANN, or take "
        text += f"the {TORCH_NPU} that was released with it"
        said.append(Problem("warning", text))
    least = DRIVER_OF.get(".".join(str(n) for n in numbers(cann)[:2]), "")
    if driver and least and numbers(driver)[:2] < numbers(least):
        text = f"have driver {driver}, need {least} or newer for CANN {cann}: update the Ascend HDK"
        said.append(Problem("error", text))
    return said + [Problem("warning", text) for text in remarks(found)]


def remarks(found: Mapping[str, str]) -> list[str]:
    """What the tables cannot tell."""
    torch_npu, cann = found.get(TORCH_NPU, ""), found.get(CANN, "")
    said = []
    if torch_npu and not cann_needed(torch_npu):
        last = max(CANN_OF, key=_release)
        said.append(
            f"{TORCH_NPU} {torch_npu} is not in the table of versions, which ends with {last} on CANN {CANN_OF[last]}: "
            "its release notes say which CANN it needs"
        )
    if cann and ".".join(str(n) for n in numbers(cann)[:2]) not in DRIVER_OF:
        said.append(f"CANN {cann} is not in the table of drivers: its release notes say which")
    return said


def _release(torch_npu: str) -> tuple[tuple[int, ...], int]:
    """((2, 9, 0), 6) for "2.9.0.post6"; a release candidate sorts before its release."""
    base = numbers(torch_npu)[:3]
    post = re.search(r"\.post(\d+)", torch_npu)
    early = re.search(r"(rc|a|b|dev)\d*", torch_npu.partition("+")[0])
    if early and len(base) < 3:  # "2.9.0rc1"
        head = re.match(r"\d+(\.\d+)*", torch_npu)
        base = numbers(head[0])[:3] if head else base
    return base, int(post[1]) if post else (-1 if early else 0)
