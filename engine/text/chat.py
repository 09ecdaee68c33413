"""Chat messages to prompt text: the messages in one form, then the model's template.

The form that templates see: `content` is always a string (or, for templates that read nothing else, a list of text
parts), keys whose value is null are absent, and the arguments of tool calls are objects.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.engine.text.template import ChatTemplate
from headrace.engine.text.tokenizer import TemplateError

_RESERVED = ("messages", "tools", "template", "add_generation_prompt", "continue_final_message")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_CONTINUE = "\ue000continue here\ue000 "  # private-use characters; the last blank shows trimming
_KEPT_TEMPLATES = 8  # compiled ones


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """ValueError when a client's extra template variables name one that the request sets itself."""
    for name in _RESERVED:
        if name in kwargs:
            raise ValueError(f"chat_template_kwargs may not set {name}")


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Fresh plain dicts, safe to hand to a template. Raises ValueError that names the message and the field.

    Text parts are joined by line ends. Roles are kept: any role that is a word is the template's to judge.
    """
    if not messages:
        raise ValueError("messages is empty: give at least one message")
    try:
        plain = msgspec.to_builtins(list(messages))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"messages cannot be read: {error}") from None
    return [_message(index, message) for index, message in enumerate(plain)]


def _message(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise ValueError(f"{where} is no object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(
            f"{where}.role is missing: one of system, developer, user, assistant, tool"
        )
    found = {key: value for key, value in message.items() if value is not None}
    found["content"] = _text(where, message.get("content"))
    calls = found.get("tool_calls")
    if calls is not None:
        found["tool_calls"] = _tool_calls(where, calls)
    reasoning = next((found[key] for key in _REASONING if key in found), None)
    if reasoning is not None:
        # templates differ in the name they read it by
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    return found


def _text(where: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}.content is neither text nor a list of parts")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part if isinstance(part, str) else None
        if kind in ("text", "input_text", "output_text"):
            text = part.get("text")
        elif kind == "refusal":
            text = part.get("refusal")
        elif kind is not None:
            raise ValueError(
                f"{where}.content[{number}] is of the type {kind!r}: this model takes text parts only"
            )
        if not isinstance(text, str):
            raise ValueError(f"{where}.content[{number}] is no text part with a text")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where}.tool_calls is no list of objects")
    for call in calls:
        function = call.get("function", call)
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = _arguments(function["arguments"])
    return calls


def _arguments(text: str) -> Any:
    """The object a JSON text holds; anything else stays the text it is."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def fold_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates without a system role: system text goes in front of the next user message's."""
    folded: list[dict[str, Any]] = []
    held: list[str] = []
    for message in messages:
        if message["role"] in ("system", "developer"):
            held.append(message["content"])
            continue
        if held and message["role"] == "user":
            message = {**message, "content": "\n\n".join([*held, message["content"]])}
            held = []
        folded.append(message)
    if held:
        folded.append({"role": "user", "content": "\n\n".join(held)})
    return folded


class ChatRenderer:
    """Renders chats with a model's templates. Thread-safe.

    `templates` by name ("default"; "tool_use" serves requests with tools). `names` are special tokens that templates
    refer to ("bos_token", ...).
    """

    def __init__(self, templates: Mapping[str, str], names: Mapping[str, str]):
        self._templates = dict(templates)
        # absent ones are empty, so that `bos_token + text` works for models without one
        self._names = {"bos_token": "", "eos_token": "", **names}
        self._compiled: dict[str, ChatTemplate] = {}
        self._lock = threading.Lock()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text. `template` is a template's text or the name of one of the model's; `kwargs` are extra
        variables for it (`enable_thinking`, `documents`, ...).

        Raises ValueError for messages or arguments of the wrong form, TemplateError from the template.
        """
        chat = normalize_messages(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError("continue_final_message needs add_generation_prompt to be false")
            chat[-1]["content"] += _CONTINUE
        compiled = self._template(template, bool(tools))
        variables: dict[str, Any] = {
            "documents": None,
            **self._names,
            **kwargs,
            "tools": msgspec.to_builtins(list(tools)) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = _render(compiled, chat, variables)
        return _cut_at_mark(text) if continue_final_message else text

    def _template(self, given: str | None, tools: bool) -> ChatTemplate:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        source = self._templates.get(given or name, given)
        if source is None:
            others = ", ".join(sorted(self._templates))
            raise TemplateError(
                f"this model has no default chat template, only {others}: name one with chat_template"
                if others
                else "this model has no chat template: use /v1/completions, or start the server with "
                "--chat-template and the path of a Jinja file"
            )
        with self._lock:
            compiled = self._compiled.pop(source, None) or ChatTemplate(source)
            self._compiled[source] = compiled  # most recently used last
            if len(self._compiled) > _KEPT_TEMPLATES:
                del self._compiled[next(iter(self._compiled))]
        return compiled


def _render(
    template: ChatTemplate, chat: list[dict[str, Any]], variables: Mapping[str, Any]
) -> str:
    """One rendering; where the template cannot take a system message, its text is folded into the user's."""
    if not template.knows_developer:
        chat = [{**m, "role": "system"} if m["role"] == "developer" else m for m in chat]
    has_system = any(m["role"] in ("system", "developer") for m in chat)
    if has_system and not template.takes_system:
        chat, has_system = fold_system(chat), False
    try:
        return template.render({**variables, "messages": _as_taken(template, chat)})
    except TemplateError:
        if not has_system:
            raise
        # it takes system messages, but perhaps not this one: a second one, or one after the start
        kept = 1 if chat[0]["role"] in ("system", "developer") else 0
        folded = [*chat[:kept], *fold_system(chat[kept:])]
        if folded == chat:
            raise
        try:
            return template.render({**variables, "messages": _as_taken(template, folded)})
        except TemplateError:
            pass  # the first error is about what the client sent
        raise


def _as_taken(template: ChatTemplate, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not template.takes_parts_only:
        return chat
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in chat]


def _cut_at_mark(text: str) -> str:
    """The text up to the mark behind the final message; trimmed at the end where the template trims messages."""
    at = text.rfind(_CONTINUE.rstrip())
    if at < 0:
        raise TemplateError(
            "continue_final_message: the chat template leaves the final message out of the text"
        )
    return text[:at] if text.startswith(_CONTINUE, at) else text[:at].rstrip()
