"""From checked requests to text: submits the sequences of one request and yields what each produces.

A Choice is one sequence: one Submit, one assembler (detokenizer and stop strings). Closing the iterator early, for
whatever reason, aborts what still runs in the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

import msgspec

from headrace.engine.core.step import TokenLogprobs
from headrace.engine.ipc.client import EngineClient
from headrace.engine.ipc.messages import RequestOutput, Submit
from headrace.engine.metrics.prometheus import ServerMetrics
from headrace.engine.server.admission import Ticket
from headrace.engine.server.errors import SERVER, ApiError, sentence, unavailable
from headrace.engine.server.prompts import Prompt
from headrace.engine.text.output import OutputAssembler, ShownToken


class Delta(msgspec.Struct):
    """New text of a choice. The choice's last one has a finish_reason."""

    choice: Choice
    text: str
    tokens: list[ShownToken]
    finish_reason: str | None = None
    prompt_logprobs: list[TokenLogprobs] = []


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence of a request and what is known of it so far. `first`: of its prompt's n choices; its cached tokens
    are the prompt's."""

    index: int
    prompt: Prompt
    submit: Submit
    assembler: OutputAssembler
    echo: str = ""  # text shown before the answer
    first: bool = True
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Context:
    """What generating needs of the server. `received`: time.monotonic() of the HTTP request."""

    client: EngineClient
    metrics: ServerMetrics
    ticket: Ticket
    received: float


async def run_choices(context: Context, choices: Sequence[Choice]) -> AsyncGenerator[Delta, None]:
    """Deltas of all choices as they come; each choice's own are in order. Gives the request's places back."""
    run = _run(context, choices[0]) if len(choices) == 1 else _merge(context, choices)
    try:
        async with aclosing(run) as deltas:
            async for delta in deltas:
                yield delta
    finally:
        context.ticket.close()


async def _merge(context: Context, choices: Sequence[Choice]) -> AsyncGenerator[Delta, None]:
    queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()

    async def pump(choice: Choice) -> None:
        try:
            async with aclosing(_run(context, choice)) as deltas:
                async for delta in deltas:
                    queue.put_nowait(delta)
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.ensure_future(pump(choice)) for choice in choices]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(context: Context, choice: Choice) -> AsyncGenerator[Delta, None]:
    watch = _Watch(context.metrics, context.received)
    finish = "abort"
    outputs = cast("AsyncGenerator[RequestOutput, None]", context.client.generate(choice.submit))
    try:
        async for output in outputs:
            watch.saw(output)
            if output.finish_reason in ("error", "abort"):
                finish = output.finish_reason
                raise _failure(output)
            delta = _assemble(choice, output)
            if delta.finish_reason:
                finish = delta.finish_reason
            yield delta
            if delta.finish_reason:
                return
        finish = "error"
        raise unavailable("The engine ended this request without a result.", "engine_failed")
    finally:
        await outputs.aclose()  # aborts it in the engine where it has not ended
        context.ticket.release()
        watch.ended(choice, finish)


def _assemble(choice: Choice, output: RequestOutput) -> Delta:
    choice.cached_tokens = output.cached_tokens or choice.cached_tokens
    new = choice.assembler.push(output)
    choice.completion_tokens = new.completion_tokens
    return Delta(choice, new.text, new.tokens, new.finish_reason, output.prompt_logprobs)


def _failure(output: RequestOutput) -> ApiError:
    if output.finish_reason == "abort" and output.error:
        return unavailable(sentence(output.error), "sleeping")
    if output.finish_reason == "abort":
        return unavailable("The server is shutting down and ended this request.", "shutting_down")
    message = output.error or "the engine failed on this request"
    return ApiError(500, sentence(message), type=SERVER, code="engine_error")


class _Watch:
    """Times of one choice, for the metrics."""

    __slots__ = ("_last", "_metrics", "_received")

    def __init__(self, metrics: ServerMetrics, received: float) -> None:
        self._metrics = metrics
        self._received = received
        self._last = 0.0

    def saw(self, output: RequestOutput) -> None:
        count = len(output.token_ids)
        if not count:
            return
        now = time.monotonic()
        if self._last:
            gap = (now - self._last) / count
        else:
            self._metrics.first_token.observe(now - self._received)
            self._metrics.queue.observe(output.queued_s)
            count -= 1
            gap = 0.0
        for _ in range(count):
            self._metrics.inter_token.observe(gap)
        self._last = now

    def ended(self, choice: Choice, finish: str) -> None:
        self._metrics.latency.observe(time.monotonic() - self._received)
        self._metrics.generation_length.observe(choice.completion_tokens)
        self._metrics.generation_tokens.inc(choice.completion_tokens)
        if choice.first:
            self._metrics.cached_tokens.inc(choice.cached_tokens)
        self._metrics.finished[finish].inc()
