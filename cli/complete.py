"""`headrace complete`: one answer, streamed to standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.cli.api import Api
from headrace.cli.errors import CliError
from headrace.cli.session import connect
from headrace.engine.config.flag import Given

NO_PROMPT = 'no prompt; example: headrace complete "Once upon a time" -m demo'


@dataclass(frozen=True, slots=True)
class Request:
    prompt: str  # "-" reads standard input
    max_tokens: int
    temperature: float  # below 0: the server's default
    as_chat: bool
    as_json: bool

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.as_chat else "/v1/completions"

    def body(self, model: str, prompt: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": model, "max_tokens": self.max_tokens}
        if self.as_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.temperature >= 0:
            body["temperature"] = self.temperature
        return body


def run(request: Request, model: str, url: str, key: str, given: Sequence[Given]) -> None:
    prompt = _prompt(request.prompt)
    with connect(model, url, key, given) as (api, name):
        body = request.body(name, prompt)
        if request.as_json:
            print(json.dumps(api.post(request.path, body), ensure_ascii=False, indent=2))
        else:
            _print_stream(api, request.path, body)


def _prompt(given: str) -> str:
    if given != "-":
        return given
    if sys.stdin.isatty():
        raise CliError(NO_PROMPT)
    text = sys.stdin.read()
    if not text:
        raise CliError(NO_PROMPT)
    return text


def _print_stream(api: Api, path: str, body: dict[str, Any]) -> None:
    for event in api.stream(path, body):
        for choice in event["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            print(text, end="", flush=True)
    print()
