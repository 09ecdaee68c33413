"""POST /v1/completions."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from headrace.engine.server.echo import echo_tokens
from headrace.engine.server.errors import invalid
from headrace.engine.server.generate import Choice, Context, Delta, run_choices
from headrace.engine.server.logprobs import completion_logprobs
from headrace.engine.server.params import (
    Generation,
    check_generation,
    check_logprobs,
    check_max_tokens,
)
from headrace.engine.server.prompts import encode_prompts, in_pool
from headrace.engine.server.protocol import CompletionRequest
from headrace.engine.server.requests import Head, Run, start_run
from headrace.engine.server.sse import encode, frame
from headrace.engine.server.state import ServerState
from headrace.engine.server.usage import usage

DEFAULT_MAX_TOKENS = 16


def check_completion(state: ServerState, body: CompletionRequest) -> Generation:
    """Everything that can be checked without the tokenizer. Raises ApiError."""
    if body.suffix:
        raise invalid("'suffix' is not supported.", "suffix", "unsupported_parameter")
    logprobs = check_logprobs(body.logprobs, "logprobs", state.config.server.max_logprobs)
    max_tokens = check_max_tokens(body.max_tokens, "max_tokens", 0)
    generation = check_generation(
        body,
        state.defaults,
        state.limits,
        state.config,
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        logprobs=logprobs,
    )
    if not body.echo:
        return generation
    sampling = msgspec.structs.replace(generation.sampling, prompt_logprobs=logprobs)
    return dataclasses.replace(generation, sampling=sampling, echo=True)


async def open_completion(
    state: ServerState,
    body: CompletionRequest,
    prompts: list[str | list[int]],
    generation: Generation,
    context: Context,
) -> Run:
    """Tokenize and make the choices."""
    head = Head.make(state, "cmpl", "text_completion", body.model)
    encoded = await encode_prompts(state, prompts, body.add_special_tokens is not False, "prompt")
    return start_run(state, head, generation, encoded, context, "prompt")


class _Writer:
    """One choice's text and legacy log-probabilities, echo first."""

    def __init__(self, run: Run, choice: Choice) -> None:
        self._run = run
        self._choice = choice
        self._echo_due = run.generation.echo

    async def write(self, delta: Delta) -> tuple[str, dict[str, list[Any]] | None]:
        """The text to show for a delta, and the logprobs object of exactly that text."""
        wanted = self._run.generation.sampling.logprobs >= 0
        logprobs = completion_logprobs(delta.tokens) if wanted else None
        if not self._echo_due:
            return delta.text, logprobs
        self._echo_due = False
        echoed = await self._echo_logprobs(delta) if wanted else None
        return self._choice.echo + delta.text, _joined(echoed, logprobs)

    async def _echo_logprobs(self, delta: Delta) -> dict[str, list[Any]]:
        """Off the event loop: a long prompt has tens of thousands of entries."""
        state, prompt = self._run.state, self._choice.prompt
        skip = self._run.generation.skip_special_tokens

        def make() -> dict[str, list[Any]]:
            return completion_logprobs(
                echo_tokens(state.tokenizer, prompt, delta.prompt_logprobs, skip)
            )

        return await in_pool(state, make)


async def completion_answer(run: Run) -> bytes:
    """The whole answer as JSON."""
    writers = [_Writer(run, choice) for choice in run.choices]
    texts: list[list[str]] = [[] for _ in run.choices]
    logprobs: list[dict[str, list[Any]] | None] = [None] * len(run.choices)
    reasons: list[str | None] = [None] * len(run.choices)
    async with aclosing(run_choices(run.context, run.choices)) as deltas:
        async for delta in deltas:
            at = delta.choice.index
            text, new = await writers[at].write(delta)
            texts[at].append(text)
            logprobs[at] = _joined(logprobs[at], new)
            reasons[at] = delta.finish_reason
    whole = run.head.fields()
    whole["choices"] = [
        {
            "index": at,
            "text": "".join(texts[at]),
            "logprobs": logprobs[at],
            "finish_reason": reasons[at],
        }
        for at in range(len(run.choices))
    ]
    whole["usage"] = usage(run.choices, run.generation.n)
    return encode(whole)


def _joined(
    before: dict[str, list[Any]] | None, new: dict[str, list[Any]] | None
) -> dict[str, list[Any]] | None:
    if before is None or new is None:
        return new if before is None else before
    for name, values in new.items():
        before[name] += values
    return before


async def completion_frames(run: Run) -> AsyncGenerator[bytes, None]:
    """SSE frames up to the usage chunk. The finish reason has a chunk of its own, with empty text."""
    prefix = run.head.chunk_prefix()
    writers = [_Writer(run, choice) for choice in run.choices]
    async with aclosing(run_choices(run.context, run.choices)) as deltas:
        async for delta in deltas:
            at = delta.choice.index
            out = b""
            tail = run.chunk_tail()
            text, logprobs = await writers[at].write(delta)
            if text or (logprobs and logprobs["tokens"]):
                out += _chunk(prefix, at, encode(text), encode(logprobs), b"null", tail)
            if delta.finish_reason:
                reason = encode(delta.finish_reason)
                out += _chunk(prefix, at, b'""', b"null", reason, tail)
            if out:
                yield out
    if run.generation.include_usage:
        final = run.head.fields()
        yield frame({**final, "choices": [], "usage": usage(run.choices, run.generation.n)})


def _chunk(
    prefix: bytes, index: int, text: bytes, logprobs: bytes, reason: bytes, tail: bytes
) -> bytes:
    start = b'%b{"index":%d,"text":%b' % (prefix, index, text)
    return b'%b,"logprobs":%b,"finish_reason":%b}%b' % (start, logprobs, reason, tail)
