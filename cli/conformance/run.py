"""`headrace conformance`: every contract test on the device at hand, in processes that may crash or hang.

Nothing is lost when one does: its test has failed, and another process goes on behind it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.console import Console

from headrace.cli.conformance.messages import (
    AREAS,
    COLLECTIVES,
    Done,
    Job,
    Message,
    Over,
    Result,
    Started,
    Test,
    Tests,
    decode,
)
from headrace.cli.conformance.report import Report
from headrace.cli.errors import RUNTIME, CliError
from headrace.engine.config.env import child_environment
from headrace.engine.config.names import nearest
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.probe import PlatformError, ResolvedPlatform, resolve_device

START_SECONDS = 300.0  # until the first message: libraries are imported, a device is opened
MOST_CRASHES = 3  # of one implementation; the rest of its tests is not run


def run(device: str, only: Sequence[str], file: str, limit: float) -> None:
    """Raises SystemExit(1) when a test failed, CliError when nothing could be tested."""
    try:
        found = resolve_device(device)
    except PlatformError as error:
        raise CliError(str(error)) from None
    _refuse_unknown(only, found)
    report = Report(found, only, file)
    report.save()  # whether the file can be written is known before the work
    console = Console()
    console.print(f"{found.device.spec}: {found.device.name}, {found.device.arch}", highlight=False)
    try:
        with Progress() as progress:
            Session(found, list(only), limit, report, progress.update).run()
    except BaseException:  # Ctrl-C among them: what is known is kept
        report.save()
        raise
    report.show(console)
    if report.failed:
        raise SystemExit(RUNTIME)


def _refuse_unknown(only: Sequence[str], found: ResolvedPlatform) -> None:
    registry = found.registry()
    for entry in only:
        op, _, name = entry.partition("=")
        known = (*CONTRACTS, *AREAS)
        if op not in known:
            guess = nearest(op, known)
            hint = f"did you mean {guess}?" if guess else f"there are {', '.join(known)}"
            raise CliError(f"--op {entry}: no op {op!r}; {hint}")
        names = [row.name for row in registry.candidates(op)]
        if name and op in (*CONTRACTS, COLLECTIVES) and name not in names:
            raise CliError(f"--op {entry}: {op} has {', '.join(names)} on {found.device.platform}")


class Session:
    """One run over all tests, through as many child processes as it takes."""

    def __init__(
        self,
        found: ResolvedPlatform,
        only: list[str],
        limit: float,
        report: Report,
        progress: Callable[[int, int, str], None],
    ) -> None:
        self._found = found
        self._only = only
        self._limit = limit
        self._report = report
        self._progress = progress
        self._tests: list[Test] = []
        self._crashes: Counter[tuple[str, str]] = Counter()

    def run(self) -> None:
        start = 0
        while start >= 0:
            start = self._skip_hopeless(start)
            if self._tests and start >= len(self._tests):
                break
            start = self._child(start)

    def _skip_hopeless(self, start: int) -> int:
        """The first test from `start` on whose implementation has not ended too many processes."""
        while start < len(self._tests):
            test = self._tests[start]
            crashes = self._crashes[test.area, test.implementation]
            if crashes < MOST_CRASHES:
                break
            self._report.add(
                test, Result("failed", f"not run: it ended the process {crashes} times")
            )
            start += 1
        return start

    def _child(self, start: int) -> int:
        """Where the next child has to start; -1 when everything is done."""
        with Child(self._job(start), self._environment()) as child:
            at, current, case, ready = start, -1, "", False
            while True:
                message = child.next(
                    self._limit if current >= 0 else max(START_SECONDS, self._limit)
                )
                if message is None and not ready:
                    how = f"{self._found.device.spec} cannot be tested: {child.end()}"
                    raise CliError(how, RUNTIME)
                if message is None:
                    return self._lost(child, at, current, case)
                if isinstance(message, Tests):
                    ready = True
                    self._tests = message.tests
                    self._report.expect(message.tests)
                elif isinstance(message, Started):
                    current, case = message.number, message.case
                    test = self._tests[current]
                    words = (test.area, test.implementation, test.text, case)
                    text = " ".join(word for word in words if word)
                    self._progress(current, len(self._tests), text)
                elif isinstance(message, Done):
                    self._report.add(self._tests[message.number], message.result)
                    at, current = message.number + 1, -1
                elif isinstance(message, Over):
                    return message.next_test

    def _lost(self, child: Child, at: int, current: int, case: str) -> int:
        """The child ended or hangs: the test it was at has failed; -1 when there is none to blame it on."""
        how = child.end()
        number = current if current >= 0 else at
        if number >= len(self._tests):
            return -1
        test = self._tests[number]
        self._crashes[test.area, test.implementation] += 1
        self._report.add(test, Result("failed", f"{case}: {how}" if case else how))
        return number + 1

    def _job(self, start: int) -> Job:
        found = self._found
        return Job(found.device, list(found.devices), self._only, start, list(sys.path))

    def _environment(self) -> dict[str, str]:
        return child_environment(**self._found.platform.worker_env(self._found.device, 0, 1))


class Child:
    """A process that computes. A context manager: it is gone at the end of the block."""

    def __init__(self, job: Job, environment: dict[str, str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed in __exit__)
        reading, writing = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli.conformance.child", str(writing)],
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=self._said,
            pass_fds=(writing,),
            env=environment,
            start_new_session=True,  # its own children end with it
        )
        os.close(writing)
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()
        self._hangs = 0.0
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            # open as long as this process lives: its end is the child's
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._said.close()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as lines:
            for line in lines:
                self._messages.put(line)
        self._messages.put(b"")

    def next(self, seconds: float) -> Message | None:
        """The next message; None when it ended without another, or said nothing for so long."""
        try:
            line = self._messages.get(timeout=seconds)
        except queue.Empty:
            self._hangs = seconds
            return None
        return decode(line) if line.endswith(b"\n") else None

    def end(self) -> str:
        """How it ended, with its last words."""
        if self._hangs:
            self._stop()
            return f"no answer within {self._hangs:g} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        code = self._process.poll()
        self._stop()
        how = f"the process ended with exit code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = f"the process was ended by {signal.Signals(-code).name}"
        words = self._last_words()
        return f"{how}: {words}" if words else how

    def _last_words(self) -> str:
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - 4000))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def _stop(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


class Progress:
    """A bar on a terminal, else a line when the implementation changes; on standard error."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._said = ""
        self._at = 0.0

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from headrace.cli.progress import test_bar

            self._bar = test_bar()
            self._bar.start()
            self._task = self._bar.add_task("starting", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=text[:70])
            return
        head = " ".join(text.split()[:2])
        if head != self._said and time.monotonic() > self._at + 2:
            self._said, self._at = head, time.monotonic()
            print(f"headrace: test {done + 1} of {total}: {head}", file=sys.stderr, flush=True)
