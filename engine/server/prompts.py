"""Prompts of requests to token ids: shapes, tokenizing and templates (in the text pool), context length."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np

from headrace.engine.server.errors import RATE_LIMIT, ApiError, invalid
from headrace.engine.server.params import check_token_ids, too_long
from headrace.engine.server.protocol import ChatRequest, TokenizeRequest
from headrace.engine.server.state import ServerState
from headrace.engine.text.pool import PoolBusy
from headrace.engine.text.tokenizer import TemplateError

P = ParamSpec("P")
R = TypeVar("R")

MAX_PROMPTS = 2048

# No token of a real vocabulary covers more text than this, so a longer text cannot fit and need not be tokenized.
LONGEST_TOKEN = 512

_MESSAGE_PATH = re.compile(r"messages\[\d+\](\.\w+(\[\d+\])?)*")

# Set by the server from the request itself; a client may not pass them a second way.
_TEMPLATE_NAMES = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "template"),
        *("chat_template", "conversation", "tokenize"),
        "self",
    }
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what the client wrote, or None when it sent ids."""

    ids: list[int]
    text: str | None = None

    def packed(self) -> bytes:
        return np.asarray(self.ids, dtype="<i4").tobytes()


def split_prompts(prompt: Any, vocab: int, param: str = "prompt") -> list[str | list[int]]:
    """The prompts of a completion request in order. An empty list is one empty prompt. Raises ApiError (400)."""
    if prompt is None:
        raise invalid(f"'{param}' is required.", param, "missing_required_parameter")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise invalid(f"'{param}' must be a string, token ids, or a list of either.", param)
    if not prompt:
        return [[]]
    if type(prompt[0]) is str or type(prompt[0]) is list:
        if len(prompt) > MAX_PROMPTS:
            raise invalid(
                f"'{param}' holds {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed.", param
            )
        for index, item in enumerate(prompt):
            where = f"{param}[{index}]"
            if type(item) is not type(prompt[0]):
                raise invalid(f"'{where}' is not of the kind of '{param}[0]'.", where)
            if not isinstance(item, str):
                check_token_ids(item, vocab, where)
        return prompt
    check_token_ids(prompt, vocab, param)
    return [prompt]


async def in_pool(state: ServerState, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Off the event loop. Raises ApiError 429 when too much waits there."""
    try:
        return await state.text.run(call, *args, **kwargs)
    except PoolBusy as error:
        raise ApiError(
            429, f"{error}.", type=RATE_LIMIT, code="queue_full", headers={"Retry-After": "1"}
        ) from None


async def decode_ids(state: ServerState, ids: list[int]) -> str:
    """Their text, special tokens included: for /detokenize."""
    return await in_pool(state, state.tokenizer.decode, ids, False)


async def encode_text(state: ServerState, text: str, add_special_tokens: bool) -> list[int]:
    """One text, whatever its length: for /tokenize."""
    (ids,) = await in_pool(state, state.tokenizer.encode_batch, [text], add_special_tokens)
    return ids


async def encode_prompts(
    state: ServerState, prompts: list[str | list[int]], add_special_tokens: bool, param: str
) -> list[Prompt]:
    """Token ids of every prompt, at least one id each."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        _check_text_length(text, state.limits.context, param)
    encoded: Iterator[list[int]] = iter(())
    if texts:
        batch = await in_pool(state, state.tokenizer.encode_batch, texts, add_special_tokens)
        encoded = iter(batch)
    ready = []
    for index, prompt in enumerate(prompts):
        where = f"{param}[{index}]" if len(prompts) > 1 else param
        if isinstance(prompt, str):
            ready.append(Prompt(_at_least_bos(state, next(encoded), where), prompt))
        else:
            ready.append(Prompt(_at_least_bos(state, prompt, where)))
    return ready


def _at_least_bos(state: ServerState, ids: list[int], param: str) -> list[int]:
    if ids:
        return ids
    bos = state.tokenizer.bos_token_id
    if bos is None:
        raise invalid(
            f"'{param}' is empty and this model has no begin-of-text token to start from.", param
        )
    return [bos]


def _check_text_length(text: str, context: int, param: str) -> None:
    if len(text) > context * LONGEST_TOKEN:
        raise too_long(f"more than {len(text) // LONGEST_TOKEN}", context, param)


async def encode_chat(
    state: ServerState,
    messages: list[dict[str, Any]],
    fields: ChatRequest | TokenizeRequest,
    add_special_tokens: bool = False,
) -> Prompt:
    """Messages by the model's chat template to token ids. Raises ApiError (400), also in the template's own words."""
    _check_template_fields(state, messages, fields)
    try:
        text = await in_pool(
            state,
            state.tokenizer.render_chat,
            messages,
            add_generation_prompt=_generation_prompt(fields),
            continue_final_message=bool(fields.continue_final_message),
            template=fields.chat_template,
            **(fields.chat_template_kwargs or {}),
        )
    except TemplateError as error:
        raise invalid(f"The chat template refused the messages: {error}", "messages") from None
    except ValueError as error:
        where = _MESSAGE_PATH.match(str(error))
        raise invalid(f"{error}.", where[0] if where else "messages") from None
    _check_text_length(text, state.limits.context, "messages")
    ids = await encode_text(state, text, add_special_tokens)
    return Prompt(_at_least_bos(state, ids, "messages"), text)


def _generation_prompt(fields: ChatRequest | TokenizeRequest) -> bool:
    if fields.add_generation_prompt is None:
        return not fields.continue_final_message
    return fields.add_generation_prompt


def _check_template_fields(
    state: ServerState, messages: list[dict[str, Any]], fields: ChatRequest | TokenizeRequest
) -> None:
    if not messages:
        raise invalid("'messages' must hold at least one message.", "messages")
    if fields.continue_final_message and fields.add_generation_prompt:
        raise invalid(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
            "continue_final_message",
        )
    if fields.continue_final_message and messages[-1].get("role") != "assistant":
        raise invalid(
            "'continue_final_message' needs a last message of the assistant.",
            "continue_final_message",
        )
    if fields.chat_template is not None and not state.config.server.trust_request_chat_template:
        raise invalid(
            "This server takes no chat templates from requests; --trust-request-chat-template allows them.",
            "chat_template",
        )
    for name in fields.chat_template_kwargs or ():
        if name in _TEMPLATE_NAMES:
            raise invalid(
                f"'chat_template_kwargs.{name}' is set by the server; use the request's own field.",
                f"chat_template_kwargs.{name}",
            )
