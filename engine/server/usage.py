"""Token counts of a request, as OpenAI reports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engine.server.generate import Choice


def usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Prompts count once whatever n is; generated tokens are summed. A prompt's cached tokens are its first
    choice's: the others always find what the first has computed."""
    first_of_each = choices[::n]
    prompt = sum(len(choice.prompt.ids) for choice in first_of_each)
    completion = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(choice.cached_tokens for choice in first_of_each)
        },
    }
