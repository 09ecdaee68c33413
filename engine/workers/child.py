"""Main module of a worker process: `python -m headrace.engine.workers.child FD`, FD being its end of a socket pair.

The parent decides when a worker ends: signals that a terminal sends to the whole group are ignored, and the end of
the pipe (the parent closed it or died, however) ends this process, even from inside a collective.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue

from headrace.engine.core.step import SCHEMA_VERSION
from headrace.engine.workers.messages import Failed, Hello, Setup, pack, unpack_for_worker


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    pipe = Connection(fd)
    pipe.send_bytes(pack(Hello(SCHEMA_VERSION, os.getpid())))
    setup = unpack_for_worker(pipe.recv_bytes())
    if not isinstance(setup, Setup) or setup.schema != SCHEMA_VERSION:
        pipe.send_bytes(pack(Failed("the engine and the worker are of different versions")))
        return
    commands: SimpleQueue = SimpleQueue()
    threading.Thread(target=_read, args=(pipe, commands), daemon=True).start()
    from headrace.engine.workers.serve import WorkerLoop  # torch: only after the greeting

    WorkerLoop(setup, commands, lambda message: pipe.send_bytes(pack(message))).run()


def _read(pipe: Connection, commands: SimpleQueue) -> None:
    try:
        while True:
            commands.put(unpack_for_worker(pipe.recv_bytes()))
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
