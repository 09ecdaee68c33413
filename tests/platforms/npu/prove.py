"""What can be shown of the NPU platform without an NPU, on top of the real torch_npu:

    python tests/platforms/npu/prove.py [--folder FOLDER] [pytest's options]

Run it with a Python in which headrace and its test extra are installed. It makes a virtual environment in FOLDER that
sees that Python's packages and adds the torch-npu of the installed torch (without its dependencies), builds libraries
that stand in for CANN's (stubs.py), and runs the tests in proof/ there. Needs gcc and binutils. About two minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
# not `-m pytest`, which puts the current folder first in the search path, and with it a stale headrace.egg-info
PYTEST = "import sys; sys.path.remove(''); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
sys.path.insert(0, str(HERE))

from stubs import make_stubs  # noqa: E402  (beside this file, which is run as a script)


def wanted() -> str:
    """torch-npu==2.13.0 for torch 2.13.0+cpu."""
    return f"torch-npu=={metadata.version('torch').partition('+')[0]}"


def environment(folder: Path) -> Path:
    """The virtual environment's Python: the packages of this one, and torch_npu."""
    home = folder / "venv"
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True, symlinks=True)
    site = site_packages(home)
    parent = sysconfig.get_path("purelib")
    # addsitedir, not a mere path: an editable install is a .pth file of its own
    (site / "parent.pth").write_text(f"import site; site.addsitedir({parent!r})\n")
    have = next(iter(site.glob("torch_npu-*.dist-info")), None)
    version = wanted().partition("==")[2]
    if have is None or not have.name.startswith(f"torch_npu-{version}."):
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q", "--no-deps", "-I", wanted()], check=True
        )
    return python


def site_packages(home: Path) -> Path:
    return next((home / "lib").glob("python3*/site-packages"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    default = Path(tempfile.gettempdir()) / "headrace-prove-npu"
    parser.add_argument("--folder", type=Path, default=default)
    known, rest = parser.parse_known_args()
    known.folder.mkdir(parents=True, exist_ok=True)
    python = environment(known.folder)
    torch = Path(sysconfig.get_path("purelib"))
    stubs = known.folder / "stubs"
    names, symbols = make_stubs(
        site_packages(known.folder / "venv"), torch / "torch" / "lib", stubs
    )
    print(f"{wanted()} with {len(names)} stub libraries of {len(symbols)} symbols", flush=True)
    variables = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{stubs}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
        "HEADRACE_PROVE_NPU": "1",
    }
    command = [str(python), "-c", PYTEST, "-q", str(HERE / "proof"), *rest]
    return subprocess.run(command, cwd=ROOT, env=variables).returncode


if __name__ == "__main__":
    sys.exit(main())
