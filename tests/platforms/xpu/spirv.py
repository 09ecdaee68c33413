"""Compile every kernel variant that the engine can select to SPIR-V, without a device: needs the triton-xpu package,
intel-sycl-rt and Level Zero's headers and loader. Where Intel's offline compiler (ocloc) is installed and knows the
device or one like it, machine code is made as well, and the registers that it spills are counted. One line a variant;
exit code 1 when one fails or lacks what it should have.

    python -m tests.platforms.xpu.spirv bmg [part of a name]
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget

from headrace.platforms.device import DeviceInfo
from headrace.platforms.triton.compile_all import compile_variant, variants
from headrace.platforms.triton.targets import Described
from headrace.platforms.xpu import tuning
from headrace.platforms.xpu.platform import XpuPlatform

KIB = 1024
# KiB of local memory that one work group may have, and the widths of sub-groups
LOCAL = {"pvc": 128, "bmg": 128, "ptl": 128, "lnl": 128, "dg2": 64, "arl": 64, "mtl": 64}
SUB_GROUPS = {"pvc": [16, 32], "bmg": [16, 32], "ptl": [16, 32], "lnl": [16, 32]}
# what ocloc is asked for; an older one than the device knows another with the same kinds of instructions
ASSEMBLED = {"pvc": "pvc", "bmg": "pvc", "ptl": "pvc", "lnl": "pvc", "dg2": "dg2"}
LARGE_REGISTER_FILE = "-cl-intel-256-GRF-per-thread"
# Registers that a kernel may spill, about. Heads of 256 hold a quarter of the file for 8 rows of sums, and Arc A
# has half the file; products on the ordinary units hold rows of both operands.
MOST_SPILLED, MOST_SPILLED_WIDE, MOST_SPILLED_PLAIN = 96, 640, 2500
MATRIX = "matrix_mad"  # in the name of the built-in function that becomes an instruction of the matrix units


class Target:
    """What compile_variant asks: the compiler's target and what launches say of their arguments."""

    def __init__(self, info: DeviceInfo) -> None:
        has = info.features.__contains__
        self.compiler = GPUTarget(
            "xpu",
            {
                "name": info.name,
                "gpu_eu_count": 8 * info.units,
                "gpu_subslice_count": info.units,
                "max_work_group_size": tuning.MOST_THREADS,
                "max_num_sub_groups": 64,
                "sub_group_sizes": SUB_GROUPS.get(info.arch, [8, 16, 32]),
                "has_fp64": has("fp64"),
                "has_subgroup_matrix_multiply_accumulate": has("xmx"),
                "has_subgroup_2d_block_io": has("block_2d"),
                "has_bfloat16_conversions": has("bf16"),
            },
            tuning.LANES,
        )

    def facts(self, name: str, kind: str) -> list[list[Any]]:
        return [["tt.divisibility", 16]]

    def resources(self, made: Any) -> Any:
        return made


def faults(made: Any, info: DeviceInfo) -> str:
    """What is wrong with a compiled kernel; "" when nothing is."""
    if made.asm["spv"][:4] != b"\x03\x02\x23\x07":
        return "no SPIR-V"
    if made.metadata.shared > LOCAL[info.arch] * KIB:
        return f"{made.metadata.shared} bytes of local memory"
    warps, lanes = made.metadata.num_warps, made.metadata.threads_per_warp
    if warps * lanes > tuning.MOST_THREADS:
        return f"{warps} sub-groups of {lanes} lanes"
    # what the elements of a product are multiplied in, of those that matrix units have
    kinds = re.findall(r"tt\.dot .*?: tensor<\S*x(\w+)> \*", made.asm["ttir"])
    exact = "f32" in kinds or ("bf16" in kinds and "bf16" not in info.features)
    if kinds and not exact and "xmx16" in info.features and MATRIX not in made.asm["llir"]:
        return "products that miss the matrix units"
    return ""


def spilled(spirv: bytes, arch: str) -> int:
    """Registers that machine code spills, about; as Triton does, a kernel that spills is built anew with the large
    register file. -1 where ocloc is not here or knows no such device. CalledProcessError when it refuses the code."""
    device = ASSEMBLED.get(arch)
    if device is None or shutil.which("ocloc") is None:
        return -1
    count = 0
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "kernel.spv")
        source.write_bytes(spirv)
        for options in ("", LARGE_REGISTER_FILE):
            command = ["ocloc", "compile", "-file", str(source), "-spirv_input", "-device", device]
            command += ["-out_dir", scratch, "-options", options]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError((done.stdout + done.stderr).strip().replace("\n", "; ")[-200:])
            found = re.search(r"spilled around (\d+)", done.stdout + done.stderr)
            count = int(found[1]) if found else 0
            if not count:
                break
    return count


def main(arch: str, part: str = "") -> int:
    info = XpuPlatform.describe(arch)
    target: Any = Target(info)
    runtime: Any = Described(info, tuning.kernel_options)
    count = bad = 0
    for variant in variants(runtime):
        if part not in variant.name or (variant.name == "sample" and "fp64" not in info.features):
            continue
        count += 1
        start = time.monotonic()
        try:
            made: Any = compile_variant(variant, target)
            wrong = faults(made, info)
            facts = f"{made.metadata.num_warps:3} x {made.metadata.threads_per_warp} lanes"
            facts += f" {made.metadata.shared:6} local {len(made.asm['spv']):8} SPIR-V"
            spills = spilled(made.asm["spv"], arch)
            facts += f" {spills:5} spilled" if spills >= 0 else ""
            tight = "x256" in variant.name or "xmx16" not in info.features
            most = MOST_SPILLED_WIDE if tight else MOST_SPILLED
            if "tt.dot" in made.asm["ttir"] and MATRIX not in made.asm["llir"]:
                most = MOST_SPILLED_PLAIN
            wrong = wrong or (f"more than {most} registers spilled" if spills > most else "")
        except Exception as error:  # one that does not compile is a finding, and so are the others
            wrong = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
            facts = "FAILED"
        bad += bool(wrong)
        took = time.monotonic() - start
        print(
            f"{variant.name:50} {facts} {took:5.1f} s{'  <- ' if wrong else ''}{wrong}", flush=True
        )
    print(f"{arch}: {count} variants, {bad} beyond the bounds")
    return 1 if bad or not count else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
