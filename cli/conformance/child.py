"""The process that computes: does the tests from one on and says each result at once.

`python -m headrace.cli.conformance.child FD`: the job is a line of standard input, whose end is the process's too;
messages are JSON lines to the descriptor FD. What a library prints goes elsewhere, so that it is no message.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import msgspec

from headrace.cli.conformance.messages import (
    MODEL,
    Done,
    Job,
    Message,
    Over,
    Result,
    Started,
    Tests,
)


def main(descriptor: int) -> None:
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    sys.path[:] = job.path
    threading.Thread(target=end_with_parent, daemon=True).start()

    pipe = os.fdopen(descriptor, "wb")

    def send(message: Message) -> None:
        pipe.write(msgspec.json.encode(message) + b"\n")
        pipe.flush()

    from headrace.cli.conformance.tests_of import Bench, planned, sentence

    bench = Bench(job.device, job.devices)
    plan = planned(bench.platform, job.only)
    send(Tests([one.test for one in plan]))
    opened = False
    for number in range(job.start, len(plan)):
        one = plan[number]
        # the engine opens the device itself: it finds it as a server would
        if one.test.area == MODEL and opened:
            send(Over(number))
            break
        opened = opened or one.test.area != MODEL
        send(Started(number))
        begun = time.perf_counter()
        alive = True
        try:
            result = one.run(bench, lambda case, number=number: send(Started(number, case)))  # type: ignore[misc]
            alive = result.status != "failed" or one.test.area == MODEL or bench.alive()
        except Exception as failure:  # whatever it is, it is this test's result
            result = Result("failed", sentence(failure))
            alive = one.test.area == MODEL or bench.alive()
        result.seconds = round(time.perf_counter() - begun, 3)
        send(Done(number, result))
        if not alive:  # a device may be lost to its process: another one goes on
            send(Over(number + 1))
            os._exit(0)
    else:
        send(Over())
    bench.close()


def end_with_parent() -> None:
    """However it ended: what it started runs in a session of its own, which no signal of a terminal reaches."""
    while sys.stdin.buffer.read(1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
