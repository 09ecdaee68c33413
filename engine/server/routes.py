"""The routes. Bodies are read and checked here by hand (see protocol.py), so nothing is validated twice."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.engine.ipc.client import EngineDead
from headrace.engine.ipc.messages import EngineProgress
from headrace.engine.server.body import read_body
from headrace.engine.server.chat import chat_answer, chat_frames, check_chat, open_chat
from headrace.engine.server.completions import (
    check_completion,
    completion_answer,
    completion_frames,
    open_completion,
)
from headrace.engine.server.errors import ApiError, invalid, sentence, unavailable
from headrace.engine.server.flights import ClientGone
from headrace.engine.server.generate import Context
from headrace.engine.server.params import check_token_ids
from headrace.engine.server.prompts import decode_ids, encode_chat, encode_text, split_prompts
from headrace.engine.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from headrace.engine.server.requests import Run, received_at
from headrace.engine.server.sse import EventStream
from headrace.engine.server.state import ServerState, version

router = APIRouter()


def state_of(request: Request) -> ServerState:
    return request.app.state.headrace


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def body_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """What /docs shows of a body that FastAPI itself does not parse."""
    (schema,), components = msgspec.json.schema_components((kind,), ref_template="#/$defs/{name}")
    root = components.pop(schema["$ref"].rpartition("/")[2])
    if components:
        root["$defs"] = components
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": root}}}}


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, at once or as server-sent events."""
    state = state_of(request)
    body = await read_body(request, ChatRequest, state.config.server.max_nesting)
    state.names.check(body.model)
    generation = check_chat(state, body)

    async def open_run(context: Context) -> Run:
        return await open_chat(state, body, generation, context)

    return await _generate(
        request, generation.n, open_run, chat_answer, chat_frames if body.stream else None
    )


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
async def completions(request: Request) -> Response:
    """Continue one or more prompts, at once or as server-sent events."""
    state = state_of(request)
    body = await read_body(request, CompletionRequest, state.config.server.max_nesting)
    state.names.check(body.model)
    prompts = split_prompts(body.prompt, state.limits.vocab)
    generation = check_completion(state, body)

    async def open_run(context: Context) -> Run:
        return await open_completion(state, body, prompts, generation, context)

    sequences = generation.n * len(prompts)
    return await _generate(
        request, sequences, open_run, completion_answer, completion_frames if body.stream else None
    )


async def _generate(
    request: Request,
    sequences: int,
    open_run: Callable[[Context], Awaitable[Run]],
    answer: Callable[[Run], Awaitable[bytes]],
    frames: Callable[[Run], AsyncGenerator[bytes, None]] | None,
) -> Response:
    """Take places in the queue and generate: a JSON answer, or with `frames` an event stream, which goes on after
    this returns. A client that goes away ends the work at once, whatever stage it is in."""
    state = state_of(request)

    async def opened() -> Run:
        ticket = state.admission.admit(sequences)
        try:
            return await open_run(
                Context(state.client, state.metrics, ticket, received_at(request))
            )
        except BaseException:
            ticket.close()
            raise

    async def whole() -> bytes:
        return await answer(await opened())

    async def begun(
        frames: Callable[[Run], AsyncGenerator[bytes, None]],
    ) -> tuple[bytes, AsyncGenerator[bytes, None]]:
        stream = frames(await opened())
        return await anext(stream), stream

    try:
        if frames is None:
            data = await state.flights.run(request.receive, whole())
            return Response(data, media_type="application/json")
        first, rest = await state.flights.run(request.receive, begun(frames))
        return EventStream(first, rest, state.flights)
    except ClientGone:
        return Response(status_code=499)  # goes nowhere; counted as what it is


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The names this server answers to."""
    state = state_of(request)
    return json_response(
        {"object": "list", "data": [_card(state, name) for name in state.names.listed]}
    )


@router.get("/v1/models/{model:path}")
async def model(request: Request, model: str) -> Response:
    """One of them."""
    state = state_of(request)
    return json_response(_card(state, state.names.check(model, None)))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "headrace",
        "root": state.names.first,
        "parent": None,
        "max_model_len": state.limits.context,
    }


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of messages, exactly as the generating routes would make them."""
    state = state_of(request)
    body = await read_body(request, TokenizeRequest, state.config.server.max_nesting)
    state.names.check(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Give either 'prompt' or 'messages'.", "prompt")
    if body.messages is not None:
        prompt = await encode_chat(state, body.messages, body, bool(body.add_special_tokens))
        ids = prompt.ids
    else:
        ids = await encode_text(state, body.prompt or "", body.add_special_tokens is not False)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": state.limits.context,
        "tokens": ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [state.tokenizer.token_text(token) for token in ids]
    return json_response(answer)


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    state = state_of(request)
    body = await read_body(request, DetokenizeRequest, state.config.server.max_nesting)
    state.names.check(body.model)
    check_token_ids(body.tokens, state.limits.vocab, "tokens")
    return json_response({"prompt": await decode_ids(state, body.tokens)})


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health(request: Request) -> Response:
    """200 while the process can answer; 503 once the engine has failed."""
    state = state_of(request)
    if state.phase == "failed":
        return json_response({"status": "failed", "reason": state.why_failed}, 503)
    return json_response({"status": "ok", "phase": state.phase})


@router.get("/ready")
@router.head("/ready", include_in_schema=False)
async def ready(request: Request) -> Response:
    """200 when requests are taken; else 503 with the phase and, while loading, how far it is."""
    state = state_of(request)
    answer: dict[str, Any] = {"status": state.phase}
    if state.phase == "ready":
        return json_response(answer)
    if state.phase == "failed":
        return json_response({**answer, "reason": state.why_failed}, 503)
    progress = state.client.progress
    if state.phase == "starting" and progress is not None:
        answer["progress"] = progress_fields(progress)
    return json_response(answer, 503, {"Retry-After": "1"})


def progress_fields(progress: EngineProgress) -> dict[str, Any]:
    return {
        "phase": progress.phase,
        "done": progress.done,
        "total": progress.total,
        "text": progress.text,
    }


@router.get("/version")
async def release(request: Request) -> Response:
    return json_response({"version": version()})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text, or OpenMetrics where the scraper asks for it."""
    body, content_type = state_of(request).metrics.render(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})


@router.get("/debug/step")
async def step(request: Request) -> Response:
    """Where a step of `requests` requests with `context` tokens each spends its time, op by op: one that decodes, or
    one that reads `prompt` tokens more of each, with `decodes` others that decode beside them. Refused while requests
    run; cached prefixes are forgotten."""
    sizes = {"requests": 1, "context": 256, "prompt": 0, "decodes": 0}
    for name in sizes:
        given = request.query_params.get(name, str(sizes[name]))
        if not (given.isascii() and given.isdigit() and len(given) < 9):
            raise invalid(f"'{name}' must be a number, not {given[:32]!r}.", name)
        sizes[name] = int(given)
    found = await call_engine(
        request, lambda why: invalid(why, "requests"), "profile_step", **sizes
    )
    return json_response(found)


async def call_engine(
    request: Request, refusal: Callable[[str], ApiError], method: str, **args: Any
) -> Any:
    """A utility's answer. 503 when the engine is gone, `refusal` with the worker's words when it could not."""
    try:
        return await state_of(request).client.call(method, **args)
    except EngineDead as error:
        raise unavailable(sentence(str(error)), "engine_failed") from error
    except RuntimeError as error:
        raise refusal(sentence(str(error))) from None


@router.get("/debug/selection")
async def selection(request: Request) -> Response:
    """Which implementation serves each op on this device, and why not the others."""
    info = state_of(request).client.info
    return json_response(
        {
            "device": info.device if info else None,
            "device_name": info.device_name if info else None,
            "dtype": info.dtype if info else None,
            "kv_dtype": info.kv_dtype if info else None,
            "selection": info.selection if info else [],
            "notes": info.notes if info else [],
        }
    )
