"""`headrace serve`: from the command line to a running server, quickest part first.

The engine process starts as soon as it is known what to run; this process imports the web server and builds the
tokenizer while the engine loads.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

from headrace.cli.errors import RUNTIME, CliError
from headrace.cli.prepare import Plan, configure, decide, prepare
from headrace.cli.progress import DownloadBar, StartBar, process_seconds
from headrace.engine.config.flag import Given
from headrace.engine.config.settings import EngineConfig
from headrace.engine.ipc.launch import EngineProcess, launch_engine
from headrace.engine.server.sockets import BindError, bind, close
from headrace.engine.weights.source import ModelError

QUIET = ("warning", "error")  # log levels without a panel


def run(model: str, given: Sequence[Given], config_file: str) -> None:
    """Serve until a signal. Raises CliError before that when the server cannot start."""
    signal.signal(signal.SIGTERM, _end)
    config = configure(model, given, config_file)
    _set_up_logging(config)
    sock = _bind(config)
    try:
        with DownloadBar() as bar:
            plan = prepare(config, progress=bar.update)
        decide(plan)
        for warning in plan.warnings:
            print(f"headrace: warning: {warning}", file=sys.stderr)
        settled = process_seconds()
        engine = launch_engine(plan.config, plan.files, plan.device, spec=plan.spec)
        code = _serve(plan, sock, engine, settled)
    finally:
        close(sock, config.server)
    if code:
        raise SystemExit(code)


def _end(number: int, frame: FrameType | None) -> None:
    """SIGTERM before the server has its own handler: an orderly end, too, so that nothing is left behind."""
    raise SystemExit(0)


def _serve(plan: Plan, sock: socket.socket, engine: EngineProcess, settled: float) -> int:
    """Everything that takes time to import is imported here, while the engine loads."""
    try:
        from headrace.engine.ipc.messages import EngineReady
        from headrace.engine.ipc.zmq_client import ZmqEngineClient
        from headrace.engine.server.run import serve
        from headrace.engine.text.load import load_tokenizer

        tokenizer = load_tokenizer(plan.files, plan.config.model.chat_template)
    except BaseException as error:
        engine.stop()
        if isinstance(error, ModelError):
            raise CliError(str(error)) from None
        raise
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
