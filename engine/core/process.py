"""The engine process: `python -m headrace.engine.core.process --boot-fd N [--preload MODULE]`.

The module is imported while the parent still finds out what to run. Started by engine/ipc/launch.py. Exit code 0
after an orderly stop, 1 after a failure, which clients are told of in an EngineFailed first. It ends when its parent
does. SIGINT and SIGTERM are ignored: terminals send them to a whole process group and service managers to every
process of a service, while only the API process knows whether requests are to be finished first. What stops the
engine is a message of its parent, STOP_SIGNAL, or the parent's end.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType

from headrace.engine.core import startup
from headrace.engine.core.boot import Boot, read_boot
from headrace.engine.core.engine import Engine
from headrace.engine.core.executor import Executor, WorkerFailed
from headrace.engine.core.stop import STOP_SIGNAL, StopSignal
from headrace.engine.ipc.messages import EngineFailed
from headrace.engine.ipc.server import EngineServer
from headrace.engine.kv_cache.plan import KVPlanError
from headrace.engine.weights.source import ModelError
from headrace.engine.weights.sources import read_spec

logger = logging.getLogger(__name__)

# Time for an orderly stop after the parent is gone; then the process ends whatever it is doing.
_ORPHAN_SECONDS = 10.0

# Failures whose text is a sentence for people. Anything else is a defect of ours and gets its traceback logged.
_EXPECTED = (WorkerFailed, KVPlanError, ModelError)


class _Stopped(BaseException):
    """STOP_SIGNAL came while the engine was starting. Nobody's `except Exception` is meant to hold it up."""


class _Signals:
    """STOP_SIGNAL: interrupts start-up wherever it is; later it only sets the flag the loop looks at."""

    def __init__(self) -> None:
        self.stop = StopSignal()
        self.starting = True
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(STOP_SIGNAL, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stop.set("the parent process asked for it")
        if self.starting:
            self.starting = False
            raise _Stopped


def _end_with_parent(fd: int) -> None:
    """Wait for the end of file of the boot pipe, without using the CPU."""
    with contextlib.suppress(OSError):
        while os.read(fd, 4096):
            pass
    logger.warning("the parent process is gone: the engine stops")
    os.kill(os.getpid(), STOP_SIGNAL)
    time.sleep(_ORPHAN_SECONDS)
    os._exit(1)


def _run(boot: Boot, server: EngineServer, signals: _Signals) -> int:
    """Start, serve, stop. A failure is announced before the workers are closed, which may take a while."""
    executor: Executor | None = None
    try:
        clock = startup.PhaseClock(server.announce)
        spec = boot.spec or read_spec(boot.files, boot.config.model.hf_overrides)
        executor = startup.make_executor(boot, startup.with_step_tokens(boot.config), spec)
        parts = startup.start(boot, executor, spec, clock)
        parts.ready.phases = clock.stop()
        signals.starting = False
        server.announce(parts.ready)
        engine = Engine(parts.scheduler, executor, server, signals.stop, parts.ready.graphs)
        gc.freeze()  # what start-up made lives as long as the process: not the collector's business
        engine.run()
        return 0
    except _Stopped:
        return 0
    except Exception as error:
        expected = isinstance(error, _EXPECTED)
        # Whoever started the engine says why it did not start; a second line here would only repeat it.
        level = logging.DEBUG if expected and signals.starting else logging.ERROR
        signals.starting = False
        logger.log(level, "the engine ends: %s", error, exc_info=not expected)
        server.announce_last(EngineFailed(str(error) or type(error).__name__))
        return 1
    finally:
        signals.starting = False
        if executor is not None:
            with contextlib.suppress(Exception):
                executor.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace.engine.core.process", allow_abbrev=False)
    parser.add_argument("--boot-fd", type=int, required=True)
    parser.add_argument("--preload", default="")
    arguments = parser.parse_args(argv)
    signals = _Signals()
    try:
        if arguments.preload:
            with contextlib.suppress(Exception):  # whoever needs it tries again and says why
                importlib.import_module(arguments.preload)
        boot = read_boot(arguments.boot_fd)
        level = logging.getLevelName(boot.config.server.log_level.upper())
        logging.basicConfig(
            level=level if isinstance(level, int) else logging.INFO,
            format="%(asctime)s %(levelname)s engine: %(message)s",
            stream=sys.stderr,
        )
        threading.Thread(target=_end_with_parent, args=(arguments.boot_fd,), daemon=True).start()
        server = EngineServer(boot.address)
        try:
            return _run(boot, server, signals)
        finally:
            server.close()
    except (_Stopped, EOFError):
        return 0


if __name__ == "__main__":
    sys.exit(main())
