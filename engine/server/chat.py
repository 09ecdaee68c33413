"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from headrace.engine.server.errors import invalid
from headrace.engine.server.generate import Context, Delta, run_choices
from headrace.engine.server.logprobs import chat_entry
from headrace.engine.server.params import (
    Generation,
    check_generation,
    check_logprobs,
    check_max_tokens,
)
from headrace.engine.server.prompts import encode_chat
from headrace.engine.server.protocol import ChatRequest
from headrace.engine.server.requests import Head, Run, start_run
from headrace.engine.server.sse import encode, frame
from headrace.engine.server.state import ServerState
from headrace.engine.server.usage import usage

_KINDS = ("text", "json_object", "json_schema")


def check_chat(state: ServerState, body: ChatRequest) -> Generation:
    """Everything that can be checked without the tokenizer. Raises ApiError."""
    _check_format(body.response_format)
    _check_tools(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    top = check_logprobs(body.top_logprobs, "top_logprobs", state.config.server.max_logprobs)
    longest = check_max_tokens(body.max_completion_tokens, "max_completion_tokens", 1)
    older = check_max_tokens(body.max_tokens, "max_tokens", 1)
    if longest is not None and older is not None and longest != older:
        raise invalid(
            f"'max_tokens' {older} and 'max_completion_tokens' {longest} differ; give one.",
            "max_tokens",
        )
    return check_generation(
        body,
        state.defaults,
        state.limits,
        state.config,
        max_tokens=older if longest is None else longest,
        logprobs=max(top, 0) if body.logprobs else -1,
    )


def _check_format(response_format: dict[str, Any] | None) -> None:
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return
    if kind in _KINDS:
        raise invalid(
            f"'response_format' of type '{kind}' is not supported yet.",
            "response_format.type",
            "unsupported_parameter",
        )
    raise invalid(
        f"'response_format.type' must be one of {', '.join(_KINDS)}.", "response_format.type"
    )


def _check_tools(body: ChatRequest) -> None:
    """Tools are accepted only where they cannot be called (tool_choice "none"); they are then left out of the
    prompt, since a model that sees tools writes calls and nothing here would parse them."""
    choice = body.tool_choice
    if choice == "none" or (not body.tools and choice in (None, "auto")):
        return
    if choice is not None and not isinstance(choice, str | dict):
        raise invalid("'tool_choice' must be a string or an object.", "tool_choice", "invalid_type")
    raise invalid(
        "Tool calls are not supported yet; leave 'tools' out or set 'tool_choice' to \"none\".",
        "tools" if body.tools else "tool_choice",
        "unsupported_parameter",
    )


async def open_chat(
    state: ServerState, body: ChatRequest, generation: Generation, context: Context
) -> Run:
    """Render, tokenize, and make the choices."""
    kind = "chat.completion.chunk" if generation.stream else "chat.completion"
    head = Head.make(state, "chatcmpl", kind, body.model)
    prompt = await encode_chat(state, body.messages, body, bool(body.add_special_tokens))
    return start_run(state, head, generation, [prompt], context, "messages")


async def chat_answer(run: Run) -> bytes:
    """The whole answer as JSON."""
    texts: list[list[str]] = [[] for _ in run.choices]
    entries: list[list[dict[str, Any]]] = [[] for _ in run.choices]
    reasons: list[str | None] = [None] * len(run.choices)
    async with aclosing(run_choices(run.context, run.choices)) as deltas:
        async for delta in deltas:
            at = delta.choice.index
            texts[at].append(delta.text)
            entries[at] += _entries(delta)
            reasons[at] = delta.finish_reason
    answer = run.head.fields()
    answer["choices"] = [
        {
            "index": at,
            "message": {"role": _role(run), "content": "".join(texts[at]), "refusal": None},
            "logprobs": _logprobs(run, entries[at]),
            "finish_reason": reasons[at],
        }
        for at in range(len(run.choices))
    ]
    answer["usage"] = usage(run.choices, run.generation.n)
    return encode(answer)


async def chat_frames(run: Run) -> AsyncGenerator[bytes, None]:
    """SSE frames up to the usage chunk; [DONE] is the response's. Role, text, reason: each in chunks of its own."""
    prefix = run.head.chunk_prefix()
    begun: set[int] = set()
    role = encode({"role": _role(run), "content": ""})
    async with aclosing(run_choices(run.context, run.choices)) as deltas:
        async for delta in deltas:
            at = delta.choice.index
            out = b""
            tail = run.chunk_tail()
            if at not in begun:
                begun.add(at)
                out += _chunk(prefix, at, role, b"null", b"null", tail)
            if delta.text or delta.tokens:
                text = b'{"content":' + encode(delta.text) + b"}"
                logprobs = encode(_logprobs(run, _entries(delta)))
                out += _chunk(prefix, at, text, logprobs, b"null", tail)
            if delta.finish_reason:
                out += _chunk(prefix, at, b"{}", b"null", encode(delta.finish_reason), tail)
            if out:
                yield out
    if run.generation.include_usage:
        final = run.head.fields()
        yield frame({**final, "choices": [], "usage": usage(run.choices, run.generation.n)})


def _chunk(
    prefix: bytes, index: int, delta: bytes, logprobs: bytes, reason: bytes, tail: bytes
) -> bytes:
    start = b'%b{"index":%d,"delta":%b' % (prefix, index, delta)
    return b'%b,"logprobs":%b,"finish_reason":%b}%b' % (start, logprobs, reason, tail)


def _entries(delta: Delta) -> list[dict[str, Any]]:
    return [chat_entry(token) for token in delta.tokens]


def _logprobs(run: Run, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    if run.generation.sampling.logprobs < 0:
        return None
    return {"content": entries, "refusal": None}


def _role(run: Run) -> str:
    return run.state.config.server.response_role
