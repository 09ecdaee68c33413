"""Signatures of the AITER functions that the ROCm platform calls, read from the package's files without importing it.

    pip download --no-deps amd-aiter
    python -m tests.platforms.rocm.aiter_facts amd_aiter-*.whl     # or a checkout of its repository

rewrites aiter_facts.json, with an entry for each source given. The tests bind the platform's calls to every entry.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from headrace.platforms.rocm.aiter.vendor import PLACES

FACTS = Path(__file__).parent / "aiter_facts.json"
ENUMS = "csrc/include/aiter_enum.h"
# of classes that are made here: what is called of them
METHODS = {"CustomAllreduce": ("__init__", "custom_all_reduce", "close")}

Read = Callable[
    [str], "str | None"
]  # text of a file by its path in the package, None when there is none


def of_wheel(path: Path) -> tuple[str, Read]:
    """(version, reader) of a wheel."""
    archive = zipfile.ZipFile(path)
    names = set(archive.namelist())

    def read(name: str) -> str | None:
        for place in (name, f"aiter_meta/{name}"):
            if place in names:
                return archive.read(place).decode()
        return None

    return path.name.split("-")[1], read


def of_repository(path: Path) -> tuple[str, Read]:
    """(commit, reader) of a git directory, with or without a work tree."""

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", "-C", str(path), *words], capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else None

    commit = (git("rev-parse", "HEAD") or "").strip()
    return commit, lambda name: git("show", f"HEAD:{name}")


class Package:
    def __init__(self, read: Read) -> None:
        self._read = read
        self._trees: dict[str, ast.Module | None] = {}

    def file_of(self, module: str) -> str | None:
        base = module.replace(".", "/")
        return next((f for f in (f"{base}.py", f"{base}/__init__.py") if self._tree(f)), None)

    def _tree(self, file: str) -> ast.Module | None:
        if file not in self._trees:
            text = self._read(file)
            self._trees[file] = None if text is None else ast.parse(text)
        return self._trees[file]

    def find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """(file, statement) that defines a name of a module last; imports within the package are followed."""
        file = self.file_of(module)
        tree = self._tree(file) if file else None
        if file is None or tree is None:
            return None
        found: tuple[str, ast.stmt] | None = None
        for node in _statements(tree.body):
            if name in _defined(node):
                found = (file, node)
            elif isinstance(node, ast.ImportFrom):
                source = _absolute(node, module, file)
                for alias in node.names:
                    wanted = name if alias.name == "*" else alias.name
                    if source.startswith("aiter") and (alias.asname or wanted) == name:
                        found = self.find(source, wanted) or found
        return found

    def parameters(self, place: str) -> dict[str, Any] | None:
        """What is known of "module:function" or "module:instance.method"; None when the package has no such thing."""
        module, _, path = place.partition(":")
        name, _, method = path.partition(".")
        found = self.find(module, name)
        if found is None:
            return None
        file, node = found
        if isinstance(node, ast.ClassDef) and not method and name in METHODS:
            functions = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
            known = {one: _parameters(functions[one], skip=True) for one in METHODS[name]}
            return {"file": file, "methods": known}
        if method:
            assert isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            made = self.find(module, ast.unparse(node.value.func))
            assert made is not None and isinstance(made[1], ast.ClassDef)
            file, owner = made[0], made[1]
            node = next(
                one for one in owner.body if isinstance(one, ast.FunctionDef) and one.name == method
            )
        if not isinstance(node, ast.FunctionDef):
            return {"file": file, "enum": self.members(name)}
        return {"file": file, "parameters": _parameters(node, skip=bool(method))}

    def members(self, enum: str) -> list[str]:
        text = self._read(ENUMS) or ""
        body = re.search(rf"enum class {enum}\b[^{{]*{{([^}}]*)}}", text)
        return re.findall(r"^\s*(\w+)", body[1], re.MULTILINE) if body else []


def _statements(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    """Those of a module, the branches of its conditions included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
            yield from _statements(s for h in getattr(node, "handlers", ()) for s in h.body)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _absolute(node: ast.ImportFrom, module: str, file: str) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if file.endswith("__init__.py") else module.split(".")[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _parameters(node: ast.FunctionDef, skip: bool) -> list[dict[str, str]]:
    signature = node.args
    assert not signature.vararg and not signature.kwarg, node.name
    positional = [*signature.posonlyargs, *signature.args]
    first = len(positional) - len(signature.defaults)
    found = []
    for index, argument in enumerate(positional):
        entry = {"name": argument.arg}
        if index >= first:
            entry["default"] = ast.unparse(signature.defaults[index - first])
        found.append(entry)
    for argument, default in zip(signature.kwonlyargs, signature.kw_defaults, strict=True):
        entry = {"name": argument.arg, "kind": "keyword"}
        found.append(entry if default is None else {**entry, "default": ast.unparse(default)})
    return found[1:] if skip else found


def signature_of(parameters: list[dict[str, str]]) -> inspect.Signature:
    """For calls to be bound to. Defaults are the texts of the source."""
    kinds = {"": inspect.Parameter.POSITIONAL_OR_KEYWORD, "keyword": inspect.Parameter.KEYWORD_ONLY}
    return inspect.Signature(
        inspect.Parameter(
            entry["name"],
            kinds[entry.get("kind", "")],
            default=entry.get("default", inspect.Parameter.empty),
        )
        for entry in parameters
    )


def facts(path: Path) -> dict[str, Any]:
    wheel = path.suffix == ".whl"
    version, read = of_wheel(path) if wheel else of_repository(path)
    package = Package(read)
    places = {place: package.parameters(place) for known in PLACES.values() for place in known}
    source = "amd-aiter" if wheel else "github.com/ROCm/aiter"
    return {"source": source, "version": version, "places": places}


def load() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(FACTS.read_text())
    return entries


def main() -> None:
    entries = [facts(Path(name)) for name in sys.argv[1:]]
    if not entries:
        raise SystemExit(__doc__)
    FACTS.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
