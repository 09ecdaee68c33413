"""Ctrl-C wherever it arrives: exit code 130, never the end by the signal itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A command that is interrupted inside exec() of a text, as an import of a dataclass may be.
SCRIPT = """
import os, signal, sys
from headrace.cli import main as cli

def interrupted(*args, **kwargs):
    exec("os.kill(os.getpid(), signal.SIGINT)\\nwhile True: pass", {"os": os, "signal": signal})

cli.app = interrupted
sys.argv = ["headrace"]
cli.main()
"""


@pytest.mark.parametrize("as_module", [True, False])
def test_interrupt_inside_exec(tmp_path: Path, as_module: bool) -> None:
    (tmp_path / "interrupted.py").write_text(SCRIPT)
    how = ["-m", "interrupted"] if as_module else ["interrupted.py"]
    done = subprocess.run(
        [sys.executable, *how], cwd=tmp_path, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (130, b"")
