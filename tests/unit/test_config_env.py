"""Environment variables: typed, documented, few."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.engine.config import env


@pytest.mark.parametrize("variable", env.VARIABLES, ids=lambda variable: variable.name)
def test_variable_is_documented_and_unset_is_the_default(variable: env.Variable) -> None:
    assert variable.doc.endswith(".")
    assert env.read(variable, {}) == variable.default
    assert env.read(variable, {variable.name: ""}) == variable.default


def test_typed_values() -> None:
    assert env.read(env.OFFLINE, {"HF_HUB_OFFLINE": "1"}) is True
    assert env.read(env.OFFLINE, {"HF_HUB_OFFLINE": "0"}) is False
    assert env.read(env.CACHE, {"HEADRACE_CACHE": "/x"}) == Path("/x")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert env.cache_dir() == Path("/xdg/headrace")
    monkeypatch.setenv("HEADRACE_CACHE", "/own")
    assert env.cache_dir() == Path("/own")


def test_nothing_else_reads_the_environment() -> None:
    import headrace.engine

    root = Path(next(iter(headrace.engine.__path__))).parent
    readers = [
        str(file.relative_to(root))
        for part in ("engine", "cli")
        for file in (root / part).rglob("*.py")
        if any(word in file.read_text() for word in ("os.environ", "os.getenv"))
    ]
    assert readers == ["engine/config/env.py"]
