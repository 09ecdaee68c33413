"""Libraries with the names and symbols of CANN's that do nothing: with them the real torch_npu can be imported.

Which libraries and symbols, the wheel's own files say: what they need (DT_NEEDED) that neither the wheel nor torch nor
the system has, and the symbols that are then left undefined. Every function returns 0 (ACL_SUCCESS), so a library may
be initialised but no device is ever found: nothing may run on "npu".

Needs gcc and binutils (nm, readelf).
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path

_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so|ld-linux")
# kinds of symbols that the dynamic linker and compiler put there
_WEAK = ("_ITM_", "__gmon_start__", "__cxa_finalize")


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def needed(library: Path) -> set[str]:
    """Names of the libraries that a library asks for."""
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", _run("readelf", "-d", str(library))))


def undefined(library: Path) -> set[str]:
    """Its undefined symbols, those of a version (of the C and C++ libraries) left out."""
    rows = (
        line.split() for line in _run("nm", "-D", "--undefined-only", str(library)).splitlines()
    )
    return {row[-1] for row in rows if "@" not in row[-1] and row[-2] == "U"}


def defined(libraries: Iterable[Path]) -> set[str]:
    names: set[str] = set()
    for library in libraries:
        lines = _run("nm", "-D", "--defined-only", str(library)).splitlines()
        names |= {line.split()[-1].partition("@")[0] for line in lines}
    return names


def make_stubs(site: Path, torch_lib: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Stub libraries in `folder` for the torch_npu in the site-packages `site`: their names, the symbols they define.

    libatb.so is not among them: torch_npu loads what needs it only when one of its ops is called.
    """
    package = site / "torch_npu"
    wheel = [*package.glob("*.so"), *(package / "lib").glob("*.so")]
    core = [path for path in wheel if "libatb.so" not in needed(path)]
    here = {path.name for path in (*wheel, *torch_lib.glob("*.so"))}
    missing = sorted(
        name
        for name in set().union(*(needed(path) for path in core)) - here
        if not _SYSTEM.match(name)
    )
    known = defined([*wheel, *torch_lib.glob("*.so"), *_python_and_cxx()])
    symbols = sorted(
        name
        for name in set().union(*(undefined(path) for path in core)) - known
        if not name.startswith(_WEAK)
    )
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "stubs.c"
    body = [f"long {name}(void) {{ return 0; }}" for name in symbols if re.fullmatch(r"\w+", name)]
    source.write_text("\n".join(body) + "\n")
    first, *others = missing
    _run("gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-o", str(folder / first), str(source))
    for name in others:  # every symbol once; the other libraries only have to be there
        _run("gcc", "-shared", "-fPIC", "-o", str(folder / name), "-x", "c", os.devnull)
    return missing, symbols


def _python_and_cxx() -> list[Path]:
    """What defines Python's and C++'s symbols: the interpreter and the libraries that the system would load."""
    interpreter = Path(os.path.realpath(f"/proc/{os.getpid()}/exe"))
    found = [interpreter]
    shared = sysconfig.get_config_var("LDLIBRARY") or ""
    folder = sysconfig.get_config_var("LIBDIR") or ""
    if shared.endswith(".so") and (Path(folder) / shared).exists():
        found.append(Path(folder) / shared)
    for name in ("libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6"):
        path = _run("gcc", f"-print-file-name={name}").strip()
        if os.path.isabs(path):
            found.append(Path(os.path.realpath(path)))
    return found
