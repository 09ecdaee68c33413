"""`echo` of completions: the prompt's text before the answer's, and its tokens before the answer's."""

from __future__ import annotations

import msgspec

from headrace.engine.core.step import TokenLogprobs
from headrace.engine.server.prompts import Prompt
from headrace.engine.text.output import ShownToken, echo_prompt, shown_token
from headrace.engine.text.tokenizer import Tokenizer


def echo_text(tokenizer: Tokenizer, prompt: Prompt, skip_special_tokens: bool) -> str:
    """The prompt as the client wrote it, or its ids as text."""
    if prompt.text is not None:
        return prompt.text
    return echo_prompt(tokenizer, prompt.ids, (), skip_special_tokens)[0]


def echo_tokens(
    tokenizer: Tokenizer, prompt: Prompt, logprobs: list[TokenLogprobs], skip_special_tokens: bool
) -> list[ShownToken]:
    """One entry a prompt token; `logprobs` are about the second and on, the first has none.

    Offsets count in `echo_text`: what the client's text does not show (a BOS that was added, the space in front of a
    first word) lies at 0.
    """
    if prompt.text is not None:
        skip_special_tokens = False  # marks that the client wrote are part of its text
    if not logprobs:
        alone = TokenLogprobs(prompt.ids[0], 0.0, 0, [], [])
        token = shown_token(tokenizer, alone, 0, skip_special_tokens)
        return [msgspec.structs.replace(token, logprob=None)]
    running, tokens = echo_prompt(tokenizer, prompt.ids, logprobs, skip_special_tokens)
    if prompt.text is None or running == prompt.text:
        return tokens
    lead = len(running) - len(prompt.text) if running.endswith(prompt.text) else 0
    return [
        msgspec.structs.replace(token, offset=min(max(token.offset - lead, 0), len(prompt.text)))
        for token in tokens
    ]
