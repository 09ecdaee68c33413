"""Field names of requests: which are read, which are harmless, which are refused, and the nearest name for the rest.

The rule: a field that would change the answer is obeyed or refused, never dropped. Harmless fields (bookkeeping and
hints that cannot change the text) are accepted and do nothing. `null` means absent for every field.
"""

from __future__ import annotations

import difflib
from typing import Any

from headrace.engine.server.errors import invalid

# Accepted, without effect: bookkeeping of the caller, or hints on speed.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "prediction",
        "request_id",
    }
)

# Known elsewhere, not supported here: accepted only with a value that means "off".
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (-1,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": (),
    "spaces_between_special_tokens": (True,),
    "documents": ([],),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "lora_path": (),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "thinking_token_budget": (),
    "typical_p": (1, 1.0),
    "top_a": (0, 0.0),
    "tfs": (1, 1.0),
    "mirostat_mode": (0,),
    "dry_multiplier": (0, 0.0),
    "no_repeat_ngram_size": (0,),
}

_HINTS = {
    "reasoning_effort": "pass what the model's template reads in chat_template_kwargs",
    "functions": "use chat messages without functions",
}


def check_names(body: dict[str, Any], known: frozenset[str]) -> None:
    """Removes harmless and neutral fields from `body`; raises a 400 that names any other foreign field."""
    for name in [name for name in body if name not in known]:
        value = body.pop(name)
        if name in HARMLESS or value is None:
            if name in HARMLESS or name in UNSUPPORTED:
                continue
        elif name in UNSUPPORTED:
            if _neutral(value, UNSUPPORTED[name]):
                continue
            hint = f"; {_HINTS[name]}" if name in _HINTS else ""
            raise invalid(f"'{name}' is not supported yet{hint}.", name, "unsupported_parameter")
        raise _unknown(name, known)


def _neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(type(value) is type(off) and value == off for off in neutral)


def _unknown(name: str, known: frozenset[str]) -> Exception:
    shown = name if len(name) <= 64 else name[:61] + "..."
    near = difflib.get_close_matches(shown, sorted(known | HARMLESS), n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    return invalid(f"Unknown field '{shown}'{hint}", shown, "unknown_parameter")
