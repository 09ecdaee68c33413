"""Checks of the tree that linters do not make: size budgets, import cycles (type-only ones included), device names.

Run from the repository root; prints every finding and exits 1 when there is one.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import grimp

MAX_FUNCTION = 80
MAX_FILE = 600
MAX_POSITIONAL = 7
MAX_CONTRACTS = (
    1500  # lines of code of platforms/*.py together: neither blank nor comment nor docstring
)
MAX_ENGINE = 14_000  # the same of engine/, mixture of experts included
KERNELS = ("platforms/triton/", "platforms/cpu/native/")
REFERENCE = ("platforms", "reference")
DEVICE_WORDS = re.compile(r"^(cuda|rocm|xpu|npu|hip|mps)$")


def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(line) for line in listed.stdout.split() if Path(line).is_file()]


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines that hold a token other than a comment or a docstring."""
    prose: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
        ):
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                prose.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    rows = enumerate(text.splitlines(), 1)
    return sum(
        1
        for number, row in rows
        if number not in prose and row.strip() and not row.strip().startswith("#")
    )


def budgets(path: Path, tree: ast.Module, lines: int) -> list[str]:
    if str(path).startswith(KERNELS):
        return []
    found = [f"{path}: {lines} lines, the budget is {MAX_FILE}"] if lines > MAX_FILE else []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION:
            found.append(
                f"{path}:{node.lineno} {node.name}: {length} lines, the budget is {MAX_FUNCTION}"
            )
        positional = [
            arg.arg
            for arg in node.args.posonlyargs + node.args.args
            if arg.arg not in ("self", "cls")
        ]
        if len(positional) > MAX_POSITIONAL and not str(path).startswith("tests/"):
            found.append(
                f"{path}:{node.lineno} {node.name}: {len(positional)} positional parameters"
            )
    return found


def shared(path: Path) -> bool:
    """Code that every device runs: the engine, the commands, the contracts, the reference."""
    top, parent = path.parts[0], path.parent
    return top in ("engine", "cli") or parent == Path("platforms") or parent.parts[:2] == REFERENCE


def device_names(path: Path, tree: ast.Module) -> list[str]:
    """A device named in a string or asked for as an attribute (x.cuda()) is a device check in the making."""
    if not shared(path):
        return []
    found = []
    for node in ast.walk(tree):
        name = node.value if isinstance(node, ast.Constant) else getattr(node, "attr", None)
        if isinstance(name, str) and DEVICE_WORDS.match(name):
            found.append(f"{path}:{node.lineno}: the device name {name!r} belongs under platforms/")
    return found


def cycles() -> list[str]:
    """Strongly connected sets of modules, by Tarjan's algorithm over every import, type-only ones included."""
    graph = grimp.build_graph(
        "headrace.platforms", "headrace.engine", "headrace.cli", cache_dir=None
    )
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[str] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in sorted(graph.find_modules_directly_imported_by(module)):
            if other not in order:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], order[other])
        if low[module] == order[module]:
            members = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(members) > 1:
                found.append("import cycle: " + ", ".join(sorted(members)))

    sys.setrecursionlimit(10_000)
    for module in sorted(graph.modules):
        if module not in order:
            visit(module)
    return found


def main() -> int:
    found: list[str] = []
    engine = contracts = 0
    for path in sources():
        text = path.read_text()
        lines = text.count("\n")
        tree = ast.parse(text)
        found += budgets(path, tree, lines)
        found += device_names(path, tree)
        code = code_lines(text, tree)
        engine += code if path.parts[0] == "engine" else 0
        contracts += code if path.parent == Path("platforms") else 0
    if engine > MAX_ENGINE:
        found.append(f"engine/: {engine} lines, the budget is {MAX_ENGINE}")
    if contracts > MAX_CONTRACTS:
        found.append(f"platforms/*.py: {contracts} lines, the budget is {MAX_CONTRACTS}")
    found += cycles()
    print(
        "\n".join(found)
        or f"structure: fine (engine {engine} lines, contracts {contracts} lines, no cycle)"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
