"""Both API forms of log-probabilities, from the tokens that the assembler shows."""

from __future__ import annotations

from typing import Any

from headrace.engine.text.output import ShownToken, TopToken


def chat_entry(token: ShownToken) -> dict[str, Any]:
    """One element of logprobs.content."""
    return {**_named(token), "top_logprobs": [_named(other) for other in token.top]}


def _named(token: ShownToken | TopToken) -> dict[str, Any]:
    data = None if token.data is None else list(token.data)
    return {"token": token.text, "logprob": token.logprob, "bytes": data}


def completion_logprobs(tokens: list[ShownToken]) -> dict[str, list[Any]]:
    """The legacy form: parallel lists. `top_logprobs` always has the token itself, its best form where texts clash."""
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _top(token: ShownToken) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    top = {token.text: token.logprob}
    for other in token.top:
        top.setdefault(other.text, other.logprob)
    return top
