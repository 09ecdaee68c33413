"""Fuzz the native library under sanitizers: python -m tests.contract.native_fuzz [--seconds 60] [--seed 1]

Builds native_fuzz.cpp with the C++ compiler named by CXX (the strongest build that this CPU runs, the portable one, and
where the CPU has all but tiles, amx_emulated with them in plain C++, under AddressSanitizer and UBSan; the pool under
ThreadSanitizer), runs each and ends with the first that fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

from headrace.platforms.cpu.builds import fitting
from headrace.platforms.cpu.platform import CpuPlatform

SOURCE = Path(__file__).with_suffix(".cpp")
LIBRARY = Path(__file__).parents[2] / "platforms/cpu/native/native.cpp"
FLAGS = {  # as setup.py compiles them
    "amx": ["-march=cooperlake", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    "amx_emulated": ["-march=cooperlake", "-include", str(SOURCE.with_name("tile_emulation.h"))],
    "avx512_bf16": ["-march=cooperlake"],
    "avx512": ["-march=cascadelake"],
    "avx2": ["-march=haswell"],
    "neon_dot": ["-march=armv8.2-a+dotprod+fp16"],
}
COMMON = [
    "-std=c++20",
    "-g",
    "-fno-math-errno",
    "-fno-omit-frame-pointer",
    "-pthread",
    "-w",
    "-Wno-psabi",
]
MEMORY = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREADS = ["-O1", "-fsanitize=thread"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="of each run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--builds",
        default="",
        help="comma-separated; default: the strongest that runs here, portable, and amx_emulated if it does",
    )
    options = parser.parse_args()
    known = fitting(CpuPlatform.probe()[0].features)
    default = [known[0], "portable"]
    if known[0] == "avx512_bf16":  # all that the AMX build needs beside its tiles
        known.append("amx_emulated")
        default.append("amx_emulated")
    builds = options.builds.split(",") if options.builds else dict.fromkeys(default)
    unknown = set(builds) - set(known)
    if unknown:
        parser.error(
            f"no build {', '.join(sorted(unknown))} runs here; take of: {', '.join(known)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        for build in builds:
            program = compiled(Path(folder) / build, [*MEMORY, *FLAGS.get(build, [])])
            run(program, "fuzz", options.seconds, options.seed)
        program = compiled(Path(folder) / "threads", [*THREADS, *FLAGS.get(known[0], [])])
        run(program, "stress", options.seconds, options.seed)


def compiled(program: Path, flags: list[str]) -> Path:
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, *COMMON, *flags, SOURCE, "-o", program], check=True)
    return program


def run(program: Path, what: str, seconds: float, seed: int) -> None:
    print(f"{program.name}: {what} for {seconds:g} s", flush=True)
    subprocess.run([program, what, str(seconds), str(seed)], check=True)


if __name__ == "__main__":
    main()
