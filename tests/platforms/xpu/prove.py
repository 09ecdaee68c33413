"""What can be proved of the XPU platform without an Intel GPU, in a virtual environment of its own.

    python tests/platforms/xpu/prove.py [--folder FOLDER] [--only extension|spirv] [--archs bmg,dg2,mtl]

1. Calls to Intel's extension for PyTorch 2.8.0 run on its own CPU kernels and agree with the reference (on_cpu.py).
2. Every Triton kernel that the engine selects compiles to SPIR-V by triton-xpu 3.3.0b1 (spirv.py), for GPUs with
   two-dimensional block loads (bmg, and the same for pvc, lnl and ptl), without (dg2; arl) and without matrix units
   (mtl). Where ocloc is installed (Debian: intel-opencl-icd), machine code is made of it and spills are bounded.

Needs Python 3.11 or another that those packages have wheels for, gcc and g++, 5 GB of disk, a package registry and, for
the second, Level Zero's headers and loader (Debian: apt install libze-dev). Exit code 0 when all of it passed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[3]
# without what they depend on: torch's wheel is the one for CUDA (stubs.py), and no package here needs the rest
BARE = (
    "torch==2.8.0",
    "intel-extension-for-pytorch==2.8.0",
    "triton-xpu==3.3.0b1",
    "intel-sycl-rt>=2025.1",
)
OTHERS = (
    *("numpy", "psutil", "packaging", "typing_extensions", "sympy", "filelock", "jinja2", "fsspec"),
    *("networkx", "setuptools", "pytest"),
)
HEADER = Path("/usr/include/level_zero/ze_api.h")
ARCHS = "bmg,dg2,mtl"


def prepare(folder: Path) -> Path:
    """The environment's interpreter; made when it is not there."""
    python, done = folder / "bin" / "python", folder / "complete"
    if done.exists():
        return python
    print(f"an environment in {folder}: torch and the extension, 1.3 GB to fetch", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    pip = (str(python), "-m", "pip", "install", "-q")
    subprocess.run([*pip, "--no-deps", *BARE], check=True)
    subprocess.run([*pip, *OTHERS], check=True)
    (library,) = folder.glob("lib/python*/site-packages/torch/lib")
    stubs = [str(python), str(Path(__file__).with_name("stubs.py")), str(library)]
    subprocess.run(stubs, check=True)
    done.touch()
    return python


def run(python: Path, *arguments: str, **environment: str) -> int:
    """One of the proofs, with the sources of this checkout."""
    paths = os.pathsep.join(str(path) for path in (ROOT / ".typing", ROOT))
    inherited = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.run([str(python), "-m", *arguments], cwd=ROOT, env=inherited).returncode


def main() -> int:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=cache / "headrace" / "prove-xpu")
    parser.add_argument("--only", choices=("extension", "spirv"))
    parser.add_argument("--archs", default=ARCHS)
    parser.add_argument("--variants", default="", help="kernels whose name holds this text")
    asked = parser.parse_args()
    if asked.only != "extension" and not HEADER.exists():
        print(f"{HEADER} is missing; apt install libze-dev, or --only extension")
        return 2
    python = prepare(asked.folder.resolve())
    failed = []
    if asked.only != "spirv" and run(python, "tests.platforms.xpu.on_cpu"):
        failed.append("the extension on the CPU")
    for arch in asked.archs.split(",") if asked.only != "extension" else ():
        settings = {
            "CC": "g++",  # Triton builds a C++ file with it
            "ZE_PATH": str(HEADER.parents[2]),
            "TRITON_CACHE_DIR": str(asked.folder.resolve() / "kernels"),
            "SYCL_DISABLE_FSYCL_SYCLHPP_WARNING": "1",
        }
        if run(python, "tests.platforms.xpu.spirv", arch, asked.variants, **settings):
            failed.append(f"kernels for {arch}")
    print(f"failed: {', '.join(failed)}" if failed else "all of it passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
