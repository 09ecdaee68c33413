"""Engine: the loop of the engine process. One poll waits for requests and for results; idle, it sleeps in that poll."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from headrace.engine.core.executor import Executor, WorkerFailed
from headrace.engine.core.sleep import ASLEEP, ENDED, Sleep
from headrace.engine.core.stop import StopSignal
from headrace.engine.ipc.messages import (
    Abort,
    Call,
    CallReply,
    Outputs,
    RequestOutput,
    Shutdown,
    Stats,
    Submit,
    ToEngine,
)
from headrace.engine.ipc.server import Audience, EngineServer
from headrace.engine.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

STATS_SECONDS = 0.1
# While steps are in flight the executor is asked this often even if its descriptor stays silent, so that the death
# of a worker that could not say so is noticed.
_PULSE_MS = 1000
# So long no request must have come before graphs are captured: who sends one after the other does not wait for them.
_REST_MS = 250


class Engine:
    """Runs until `stop` is set or a Shutdown arrives. Raises WorkerFailed when the workers are lost.

    Utility calls run between steps, with none in flight: scheduling pauses until they are answered. A call to sleep
    comes after the last request, and from the moment it arrives no other request is taken.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        server: EngineServer,
        stop: StopSignal,
        graphs: int = 0,
    ) -> None:
        """`graphs`: how many are to be captured, one at a time when there is nothing else to do."""
        self._scheduler = scheduler
        self._executor = executor
        self._server = server
        self._stop = stop
        self._audience = Audience()
        self._outputs: list[RequestOutput] = []
        self._calls: deque[tuple[bytes, Call]] = deque()
        self._bedtime: deque[tuple[bytes, Call]] = deque()  # calls to sleep that wait for requests
        self._sleep = Sleep(executor, scheduler)
        self._next_stats = 0.0
        self._busy = False
        self._graphs, self._graphs_planned = 0, graphs
        self._capturing = graphs > 0
        self._resting = True  # no request came for a while
        self._poller = zmq.Poller()
        self._poller.register(server.socket, zmq.POLLIN)
        self._poller.register(executor.fileno(), zmq.POLLIN)
        self._poller.register(stop.fileno(), zmq.POLLIN)

    def run(self) -> None:
        self._receive()
        while not self._stop.is_set:
            self._serve_calls()
            self._submit_steps()
            self._send_outputs()
            self._send_stats()
            ready = dict(self._poller.poll(self._patience()))
            if self._server.socket in ready:
                self._receive()
            elif not ready:
                self._capture_graph()
            self._collect()
        self._outputs += self._scheduler.abort_all()
        self._send_outputs()

    def _patience(self) -> int | None:
        """Milliseconds to wait for news."""
        if self._scheduler.steps_in_flight:
            return _PULSE_MS
        if not self._capturing or self._sleep.closed:
            return None
        return 0 if self._resting else _REST_MS

    def _capture_graph(self) -> None:
        """Between requests: one that comes meanwhile waits for one capture."""
        if not self._capturing or self._scheduler.has_unfinished or self._calls:
            return
        self._resting = True
        try:
            answer = self._executor.call("capture_graph")
        except WorkerFailed:
            raise
        except Exception as error:
            logger.warning("graphs are captured only when they are needed: %s", error)
            self._capturing = False
            return
        self._graphs, self._capturing = answer["graphs"], answer["more"]
        self._server.broadcast(self._stats())
        if self._graphs == self._graphs_planned:
            logger.info("all %d graphs are captured", self._graphs)

    # ---- messages

    def _receive(self) -> None:
        for client, message in self._server.receive():
            self._handle(client, message)

    def _handle(self, client: bytes, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._submit(client, message)
        elif isinstance(message, Abort):
            self._outputs += self._scheduler.abort(message.request_ids)
        elif isinstance(message, Call) and message.method == "sleep":
            self._before_sleep(client, message)
        elif isinstance(message, Call):
            answer = self._answer_at_once(message)
            if answer is None:
                self._calls.append((client, message))
            else:
                self._server.send(client, CallReply(message.call_id, answer))
        elif isinstance(message, Shutdown):
            self._stop.set("a client asked for it")

    def _submit(self, client: bytes, submit: Submit) -> None:
        if submit.request_id in self._audience:
            logger.error("a second request with the id %r was dropped", submit.request_id)
            return
        self._audience.add(submit.request_id, client)
        self._resting = False
        if self._sleep.closed:
            self._outputs.append(
                RequestOutput(submit.request_id, finish_reason="abort", error=ASLEEP)
            )
            return
        refusal = self._scheduler.add(submit)
        if refusal is not None:
            self._outputs.append(refusal)

    def _send_outputs(self) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            for client, share in self._audience.split(outputs).items():
                self._server.send(client, Outputs(share))

    def _send_stats(self) -> None:
        """At most every STATS_SECONDS while busy, and once when idle begins."""
        busy = self._scheduler.has_unfinished or self._scheduler.steps_in_flight > 0
        now = time.monotonic()
        if (busy and now >= self._next_stats) or (self._busy and not busy):
            self._next_stats = now + STATS_SECONDS
            self._server.broadcast(self._stats())
        if self._busy and not busy:
            self.check_integrity()
        self._busy = busy

    def _stats(self) -> Stats:
        return msgspec.structs.replace(
            self._scheduler.stats(),
            sleeping=self._sleep.closed,
            graphs=self._graphs,
            graphs_planned=self._graphs_planned,
        )

    def check_integrity(self) -> None:
        """Called when idle begins: whatever is still held then has leaked, which is logged as an error.

        Counts are compared first: looking at every block of a large cache takes longer than a step.
        """
        if self._scheduler.holds_nothing:
            return
        problems = self._scheduler.problems()
        if problems:
            logger.error("the scheduler lost track of its resources: %s", "; ".join(problems))

    # ---- steps

    def _submit_steps(self) -> None:
        if self._calls:
            return
        scheduler = self._scheduler
        while scheduler.steps_in_flight < self._executor.depth:
            plan = scheduler.schedule()
            if plan is None:
                break
            self._executor.submit(plan)
        if scheduler.has_unfinished and not scheduler.steps_in_flight:
            logger.error("no step could be made although requests wait: the first one fails")
            self._outputs += scheduler.fail_stalled()

    def _collect(self) -> None:
        """Also when no step is in flight: this is how the death of an idle worker is noticed."""
        while (result := self._executor.poll(0.0)) is not None:
            self._graphs = result.graphs or self._graphs
            self._outputs += self._scheduler.complete(result)

    # ---- utility calls

    def _before_sleep(self, client: bytes, call: Call) -> None:
        """Take no more requests; those that run finish first with mode "wait", else they end now."""
        self._bedtime.append((client, call))
        self._sleep.closed = True
        self._server.broadcast(self._stats())
        if call.args.get("mode") != "wait":
            for output in self._scheduler.abort_all():
                output.error = ENDED
                self._outputs.append(output)

    def _cancel_bedtime(self) -> None:
        for client, call in self._bedtime:
            error = "wake_up came before the running requests had finished"
            self._server.send(client, CallReply(call.call_id, error=error))
        self._bedtime.clear()

    def _serve_calls(self) -> None:
        if not self._scheduler.has_unfinished:
            self._calls.extend(self._bedtime)
            self._bedtime.clear()
        while self._calls and not self._scheduler.steps_in_flight:
            self._send_outputs()  # who was ended for a call hears of it before whoever called
            client, call = self._calls.popleft()
            if call.method == "wake":
                self._cancel_bedtime()
            try:
                self._clear_for(call)
                reply = CallReply(call.call_id, self._sleep.call(call))
            except WorkerFailed:
                raise
            except Exception as error:
                # a call that fails is its caller's trouble, not the engine's
                reply = CallReply(call.call_id, error=str(error) or type(error).__name__)
            if call.method == "wake":  # graphs may be gone: ask again
                self._capturing = self._graphs_planned > 0
            if call.method in ("sleep", "wake"):
                # before the answer: who has it knows the state
                self._server.broadcast(self._stats())
            self._server.send(client, reply)

    def _clear_for(self, call: Call) -> None:
        """A profile writes into rows and blocks of its own choice. RuntimeError while they are in use."""
        if call.method == "profile_step":
            if self._scheduler.has_unfinished:
                raise RuntimeError("requests are running; profile a server that has nothing to do")
            self._scheduler.kv.forget_all()

    def _answer_at_once(self, call: Call) -> Any:
        """What the engine knows itself; None for a call of the workers."""
        if call.method == "stats":
            return self._stats()
        if call.method == "reset_prefix_cache":
            self._scheduler.kv.forget_all()
            return True
        return None
