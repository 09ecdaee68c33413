"""A signal ends a command wherever it arrives, even where its exception is lost on the way.

Python's answer to a signal is an exception in whatever code runs at that moment. Compiled libraries turn that into an
error of their own (pydantic builds its validators while the web server is imported) and callbacks drop it. So the
signal is noted as well: `ended_by` outlives the exception.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from headrace.cli.errors import INTERRUPTED

_ended_by: int | None = None  # signals belong to the process: so does this


def watch(number: signal.Signals) -> None:
    """From now on `number` is noted and raises KeyboardInterrupt (SIGINT) or SystemExit(0). Main thread only."""
    signal.signal(number, _note)


def ended_by() -> int | None:
    """The exit code that a noted signal asks for: 130 after SIGINT, 0 after SIGTERM; None without one."""
    return _ended_by


def check() -> None:
    """Raise SystemExit if a signal was noted: called where it is still cheap to turn back."""
    if _ended_by is not None:
        raise SystemExit(_ended_by)


def forget() -> None:
    """The command has dealt with the signal and goes on."""
    global _ended_by
    _ended_by = None
    sys.unraisablehook = sys.__unraisablehook__


def _note(number: int, frame: FrameType | None) -> None:
    global _ended_by
    interrupted = number == signal.SIGINT
    _ended_by = INTERRUPTED if interrupted else 0
    sys.unraisablehook = (
        _silent  # where no caller could take the exception, Python would print its traceback
    )
    raise KeyboardInterrupt if interrupted else SystemExit(0)


def _silent(unraisable: object) -> None:
    """What was lost is noted."""
