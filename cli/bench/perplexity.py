"""Perplexity of a model on a text: how well each token is predicted from those before it, by log-probabilities."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from headrace.cli.api import Address
from headrace.cli.bench.client import call
from headrace.cli.errors import RUNTIME, CliError

CONCURRENT = 4  # windows under way: the server is never idle between them


@dataclass(frozen=True, slots=True)
class Window:
    tokens: list[int]
    scored: int  # of its last tokens


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CliError(f"{path} is no UTF-8 text; name a text file") from None


def windows(ids: Sequence[int], context: int, stride: int, bos: int | None) -> list[Window]:
    """Windows of `context` tokens, one beginning every `stride`; what does not fill the last one is left out.

    A window scores what follows its first half, so that each of these tokens has at least half a window before it, and
    at most `stride` of them, so that none counts twice. With half of it every token after the first half window counts.
    With stride = context this is what llama.cpp's perplexity tool does: it leaves out one token more, the first of the
    second half, and that decides the third digit. `bos` begins every window of a model with one.
    """
    scored = min(stride, context - context // 2)
    if stride == context:
        scored = max(1, scored - 1)
    made = []
    for start in range(0, len(ids) - context + 1, stride):
        tokens = list(ids[start : start + context])
        if bos is not None:
            tokens[0] = bos
        made.append(Window(tokens, scored))
    return made


def summarize(logprobs: Sequence[float]) -> dict[str, Any]:
    """Perplexity exp(mean of -log p) and its standard error, from natural log-probabilities."""
    mean = -fmean(logprobs)
    spread = stdev(logprobs) / math.sqrt(len(logprobs)) if len(logprobs) > 1 else 0.0
    perplexity = math.exp(mean)
    return {
        "perplexity": perplexity,
        "error": perplexity * spread,
        "nll": mean,
        "scored_tokens": len(logprobs),
    }


async def measure(
    where: Address,
    model: str,
    text: str,
    sizes: tuple[int, int],
    update: Callable[[int, int], None],
) -> dict[str, Any]:
    """`sizes`: (context, stride) in tokens, 0 = as large as is usual. `update(done, all)` counts windows."""
    ids, bos, longest = await _tokens(where, model, text)
    context = sizes[0] or min(512, longest - 1)
    if context >= longest:
        raise CliError(f"--context {context} does not fit the server's context of {longest}")
    stride = sizes[1] or max(1, context // 2)
    if stride > context:
        raise CliError(f"--stride {stride} would leave out tokens between windows of {context}")
    made = windows(ids, context, stride, bos)
    if not made or context < 2:
        raise CliError(
            f"the text has {len(ids)} tokens and a window {context}; give a longer text or --context"
        )
    began = time.perf_counter()
    gate, done = asyncio.Semaphore(CONCURRENT), 0

    async def score(window: Window) -> list[float]:
        nonlocal done
        async with gate:
            found = await _score(where, model, window)
        done += 1
        update(done, len(made))
        return found

    parts = await asyncio.gather(*map(score, made))
    seconds = time.perf_counter() - began
    return {
        **summarize([value for part in parts for value in part]),
        "windows": len(made),
        "context": context,
        "stride": stride,
        "text_tokens": len(ids),
        "seconds": seconds,
        "tokens_per_s": len(made) * context / seconds,
    }


async def _tokens(where: Address, model: str, text: str) -> tuple[list[int], int | None, int]:
    """(ids of the text, beginning-of-sequence token if the model has one, the server's context)."""
    body = {"model": model, "prompt": text}
    whole = await call(where, "/tokenize", {**body, "add_special_tokens": True})
    plain = await call(where, "/tokenize", {**body, "add_special_tokens": False})
    if whole is None or plain is None:
        raise CliError(f"the server at {where} has no /tokenize; measure one of headrace", RUNTIME)
    ids, bare = whole["tokens"], plain["tokens"]
    bos = ids[0] if ids and ids[:1] != bare[:1] else None
    # what a tokenizer may put behind the text is none of it
    return ids[: len(bare) + (bos is not None)], bos, whole["max_model_len"]


async def _score(where: Address, model: str, window: Window) -> list[float]:
    body = {
        "model": model,
        "prompt": window.tokens,
        "max_tokens": 1,
        "echo": True,
        "logprobs": 0,
        "temperature": 0.0,
    }
    reply = await call(where, "/v1/completions", body)
    if reply is None:
        raise CliError(f"the server at {where} has no /v1/completions", RUNTIME)
    found = reply["choices"][0]["logprobs"]["token_logprobs"][: len(window.tokens)]
    return [float(value) for value in found[-window.scored :]]
