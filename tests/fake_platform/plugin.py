"""Fixture that installs the fake platform as any user would: with pip, as a package of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent


def install(source: Path, folder: Path) -> Path:
    """Build and install the package in `source` with pip, without network; the folder that it is in."""
    # built from a copy: the build leaves files behind
    shutil.copytree(source / "src", folder / "source" / "src")
    shutil.copy(source / "pyproject.toml", folder / "source")
    target = folder / "installed"
    options = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(target),
    ]
    command = [sys.executable, "-m", "pip", "install", *options, str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@contextmanager
def on_path(folder: Path) -> Iterator[Path]:
    """`folder` on sys.path and on PYTHONPATH (for child processes)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield folder


@pytest.fixture(scope="session")
def fake_platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder with the installed package, on sys.path and on PYTHONPATH (for child processes)."""
    with on_path(install(SOURCE, tmp_path_factory.mktemp("fake_platform"))) as folder:
        yield folder
