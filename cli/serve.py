"""`headrace serve`: from the command line to a running server, quickest part first.

The engine process starts as soon as the device is known and loads its libraries while this process finds the model;
this process imports the web server and builds the tokenizer while the engine loads the weights.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.cli import signals
from headrace.cli.configure import configure, find_device
from headrace.cli.errors import RUNTIME, CliError
from headrace.cli.progress import DownloadBar, StartBar, process_seconds
from headrace.engine.config.flag import Given
from headrace.engine.config.settings import EngineConfig
from headrace.engine.ipc.launch import EngineProcess, start_engine
from headrace.engine.server.sockets import BindError, bind, close
from headrace.engine.weights.source import ModelError
from headrace.platforms.probe import ResolvedPlatform

if TYPE_CHECKING:
    from headrace.cli.prepare import Plan

QUIET = ("warning", "error")  # log levels without a panel


def run(model: str, given: Sequence[Given], config_file: str) -> None:
    """Serve until a signal. Raises CliError before that when the server cannot start."""
    signals.watch(
        signal.SIGTERM
    )  # until the server has its own handler: an orderly end, nothing left behind
    config = configure(model, given, config_file)
    _set_up_logging(config)
    sock = _bind(config)
    try:
        found = find_device(config)
        engine = start_engine(config, found.device)
        try:
            code = _serve(_plan(config, found), sock, engine)
        except BaseException:
            engine.stop()
            raise
    finally:
        close(sock, config.server)
    if code:
        raise SystemExit(code)


def _plan(config: EngineConfig, found: ResolvedPlatform) -> Plan:
    """All that can be known before weights are read; mistakes end here."""
    from headrace.cli.prepare import decide, prepare

    with DownloadBar() as bar:
        plan = prepare(config, found, bar.update)
    decide(plan)
    for warning in plan.warnings:
        print(f"headrace: warning: {warning}", file=sys.stderr)
    return plan


def _serve(plan: Plan, sock: socket.socket, engine: EngineProcess) -> int:
    """Everything that takes time to import is imported here, while the engine loads."""
    engine.boot(plan.config, plan.files, plan.device, plan.spec)
    settled = process_seconds()
    try:
        from headrace.engine.ipc.messages import EngineReady
        from headrace.engine.ipc.zmq_client import ZmqEngineClient
        from headrace.engine.server.run import serve
        from headrace.engine.text.load import load_tokenizer

        tokenizer = load_tokenizer(plan.files, plan.config.model.chat_template)
    except ModelError as error:
        raise CliError(str(error)) from None
    signals.check()
    client = ZmqEngineClient(engine.address, engine)
    failures = _StartFailures()
    logging.getLogger("headrace.server").addFilter(failures)
    with StartBar(lambda: client.progress) as bar:

        def ready(info: EngineReady, sock: socket.socket) -> None:
            bar.stop()
            failures.starting = False
            if plan.config.server.log_level not in QUIET:
                from headrace.cli.panel import show

                show(plan, info, sock, tokenizer, settled)

        code = serve(plan.config, plan.files, tokenizer, client, engine, sock=sock, on_ready=ready)
    if code and failures.starting:
        raise CliError(client.failure or failures.last or "the engine did not start", RUNTIME)
    return code


class _StartFailures(logging.Filter):
    """Until the server is ready its failure is this command's own last line, not a log record as well."""

    def __init__(self) -> None:
        super().__init__()
        self.starting = True
        self.last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if self.starting and record.levelno >= logging.ERROR:
            self.last = record.getMessage()
            return False
        return True


def _bind(config: EngineConfig) -> socket.socket:
    try:
        return bind(config.server)
    except BindError as error:
        raise CliError(str(error), RUNTIME) from None


def _set_up_logging(config: EngineConfig) -> None:
    logging.basicConfig(
        level=config.server.log_level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    if config.server.log_level != "debug":
        for name in ("httpx", "huggingface_hub", "filelock"):
            logging.getLogger(name).setLevel(logging.WARNING)
