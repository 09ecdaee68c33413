"""Signatures of the attention libraries that the CUDA platform calls, read from their files without importing them.

    pip download --no-deps flashinfer-python
    python -m tests.platforms.cuda.vendor_facts flashinfer_python-*.whl flash-attention/

rewrites vendor_facts.json from wheels, and from git directories with or without a work tree, each of which may have
some of the places. The tests bind the platform's calls to all of them.
"""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FACTS = Path(__file__).parent / "vendor_facts.json"

_WRAPPER = ("__init__", "plan", "run", "reset_workspace_buffer")
# file and name -> what is called of it: methods of a class, nothing of a function
PLACES: dict[tuple[str, str], tuple[str, ...]] = {
    ("flashinfer/prefill.py", "BatchPrefillWithPagedKVCacheWrapper"): _WRAPPER,
    ("flashinfer/decode.py", "BatchDecodeWithPagedKVCacheWrapper"): _WRAPPER,
    ("flash_attn/flash_attn_interface.py", "flash_attn_with_kvcache"): (),
    ("flash_attn/flash_attn_interface.py", "flash_attn_varlen_func"): (),
    ("hopper/flash_attn_interface.py", "flash_attn_with_kvcache"): (),
}
# Where a method only looks at deprecated arguments and passes the others on.
BEHIND = {"plan": "_plan_impl"}

Read = Callable[[str], "str | None"]  # text of a file; None when there is none


def reader(path: Path) -> tuple[str, Read]:
    """(source with its version, reader) of a wheel or a git directory."""
    if path.suffix == ".whl":
        archive = zipfile.ZipFile(path)
        names = set(archive.namelist())
        name, version = path.name.split("-")[:2]
        return f"{name} {version}", lambda at: archive.read(at).decode() if at in names else None

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", "-C", str(path), *words], capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else None

    commit = (git("rev-parse", "HEAD") or "").strip()
    return f"commit {commit}", lambda at: git("show", f"HEAD:{at}")


def facts(read: Read) -> dict[str, Any]:
    """By "file:name" or "file:class.method", the parameters."""
    found: dict[str, Any] = {}
    for (file, name), methods in PLACES.items():
        text = read(file)
        if text is None:
            continue
        defined = {one.name: one for one in ast.parse(text).body if isinstance(one, _DEFINITIONS)}
        node = defined[name]
        if isinstance(node, ast.FunctionDef):
            found[f"{file}:{name}"] = _parameters(node)
            continue
        # the last of several definitions: those before are overloads
        own = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
        for method in methods:
            real = BEHIND.get(method, method)
            found[f"{file}:{name}.{method}"] = _parameters(own.get(real, own[method]))[1:]
    return found


_DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


def _parameters(node: ast.FunctionDef) -> list[dict[str, str]]:
    signature = node.args
    positional = [*signature.posonlyargs, *signature.args]
    first = len(positional) - len(signature.defaults)
    found = []
    for index, argument in enumerate(positional):
        entry = {"name": argument.arg}
        if index >= first:
            entry["default"] = ast.unparse(signature.defaults[index - first])
        found.append(entry)
    if signature.vararg:
        found.append({"name": signature.vararg.arg, "kind": "all"})
    for argument, default in zip(signature.kwonlyargs, signature.kw_defaults, strict=True):
        entry = {"name": argument.arg, "kind": "keyword"}
        found.append(entry if default is None else {**entry, "default": ast.unparse(default)})
    return found


def signature_of(parameters: list[dict[str, str]]) -> inspect.Signature:
    """For calls to be bound to. Defaults are the texts of the source."""
    kinds = {
        "": inspect.Parameter.POSITIONAL_OR_KEYWORD,
        "all": inspect.Parameter.VAR_POSITIONAL,
        "keyword": inspect.Parameter.KEYWORD_ONLY,
    }
    return inspect.Signature(
        inspect.Parameter(
            entry["name"],
            kinds[entry.get("kind", "")],
            default=entry.get("default", inspect.Parameter.empty),
        )
        for entry in parameters
    )


def load() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(FACTS.read_text())
    return entries


def main() -> None:
    entries = []
    for path in map(Path, sys.argv[1:]):
        source, read = reader(path)
        entries.append({"source": source, "places": facts(read)})
    if not entries:
        raise SystemExit(__doc__)
    FACTS.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
