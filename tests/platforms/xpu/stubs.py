"""Empty libraries in place of NVIDIA's, so that a build of torch for CUDA imports without them and computes on the CPU.

The wheel of torch 2.8 that registries have for Linux is the one for CUDA: its libraries ask for 14 others at load, 2.5
GB of them. Each one that is missing is made from the names that torch leaves undefined, with the version that the
loader asks for. A function answers 0, and the one that counts devices an error.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice
VENDOR = re.compile(r"lib(cu|nccl|nv)")


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _examine(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Missing libraries, and undefined names of theirs with their version ("" = none)."""
    needed: set[str] = set()
    undefined: dict[str, str] = {}
    defined: set[str] = set()
    own = sorted(
        path
        for path in folder.glob("*.so")
        if path.name.startswith(("libtorch", "libc10", "libcaffe2"))
    )
    for path in own:
        needed |= set(re.findall(r"NEEDED.*\[(.+?)\]", _run("readelf", "-d", str(path))))
        for line in _run("nm", "-D", str(path)).splitlines():
            *kind, symbol = line.split()
            name, _, version = symbol.partition("@")
            if kind == ["U"]:
                undefined[name] = version.strip("@")
            elif len(kind) == 2:
                defined.add(name)
    missing = sorted(name for name in needed if VENDOR.match(name) and not (folder / name).exists())
    theirs = re.compile(r"(cu|nccl|nv|__cuda)")
    return missing, {
        name: version
        for name, version in undefined.items()
        if version in missing or (not version and name not in defined and theirs.match(name))
    }


def make(folder: Path) -> list[str]:
    """Write what is missing beside torch's own libraries; the names written."""
    missing, undefined = _examine(folder)
    loose = sorted(name for name, version in undefined.items() if not version)
    for library in missing:
        versioned = sorted(name for name, version in undefined.items() if version == library)
        code = [".text"]
        for name in versioned + (loose if library == missing[0] else []):
            answer = NO_DEVICE if name == "cudaGetDeviceCount" else 0
            code.append(f".globl {name}\n.type {name},@function\n{name}: movl ${answer},%eax\n ret")
        code.append('.section .note.GNU-stack,"",@progbits\n')
        names = "".join(f"{name}; " for name in versioned)
        with tempfile.TemporaryDirectory() as scratch:
            source, versions = Path(scratch, "stub.s"), Path(scratch, "versions")
            source.write_text("\n".join(code))
            # the loader insists on the version's node even where no name has it
            versions.write_text(f"{library} {{ {f'global: {names}' if names else ''} }};\n")
            made = Path(scratch, library)
            _run(
                *("gcc", "-shared", "-nostdlib", "-o", str(made), f"-Wl,-soname,{library}"),
                *(f"-Wl,--version-script={versions}", str(source)),
            )
            (folder / library).write_bytes(made.read_bytes())
    return missing


if __name__ == "__main__":
    print(", ".join(make(Path(sys.argv[1]))) or "nothing is missing")
