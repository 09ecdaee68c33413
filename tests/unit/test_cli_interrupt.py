"""Ctrl-C wherever it arrives: exit code 130, never the end by the signal itself."""

from __future__ import annotations

import signal
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


# A library makes an error of its own out of the signal's exception, or drops it and the command goes on.
CONVERTED = """
import os, signal, sys
from headrace.cli import main as cli, signals

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[2]))
        while signals.ended_by() is None: pass
        1 / 0

def loads(*args, **kwargs):
    signals.watch(signal.SIGTERM)
    if sys.argv[1] == "dropped":
        Dropped()
        signals.check()
        print("still here")
    try:
        os.kill(os.getpid(), int(sys.argv[2]))
        while True: pass
    except BaseException as error:
        raise ValueError(f"cannot build: {error!r}") from None

cli.app = loads
cli.main()
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["int", "term"]
)
@pytest.mark.parametrize("how", ["converted", "dropped"])
def test_signal_whose_exception_is_lost(
    tmp_path: Path, how: str, number: signal.Signals, code: int
) -> None:
    script = tmp_path / "lost.py"
    script.write_text(CONVERTED)
    done = subprocess.run(
        [sys.executable, str(script), how, str(int(number))],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")
