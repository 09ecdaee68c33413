"""Fixture that installs the fake platform as any user would: with pip, as a package of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent


@pytest.fixture(scope="session")
def fake_platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder with the installed package, on sys.path and on PYTHONPATH (for child processes)."""
    folder = tmp_path_factory.mktemp("fake_platform")
    # built from a copy: the build leaves files behind
    shutil.copytree(SOURCE / "src", folder / "source" / "src")
    shutil.copy(SOURCE / "pyproject.toml", folder / "source")
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
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(target))
        paths = [str(target), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield target
