"""Sampling fields to SamplingParams: ranges, defaults and limits. Raises ApiError (400) naming the field.

Documented rules: temperature below 1e-3 is greedy; top_k 0 and -1 are off and above the vocabulary means off; top_p 0
keeps the likeliest token alone; max_tokens beyond the context is cut to the room that is left.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from headrace.engine.config.settings import EngineConfig, ServerSettings
from headrace.engine.core.sampling import SamplingParams
from headrace.engine.server.errors import ApiError, invalid
from headrace.engine.server.protocol import GenerationFields

MAX_BIAS_ENTRIES = 1024
MAX_STOP_IDS = 128
GREEDY_BELOW = 1e-3
SMALLEST_TOP_P = 1e-9
INT32_MAX = 2**31 - 1

Number = TypeVar("Number", int, float)

# name -> (least, greatest); both allowed
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "top_k": (-1, 2**63 - 1),
    "seed": (0, 2**63 - 1),
    "min_tokens": (0, INT32_MAX),
    "priority": (-(2**31), INT32_MAX),
}


class Seeds:
    """Seeds for choices whose request gives none: unforeseeable, or with the server's seed a fixed sequence."""

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._drawn = 0

    def draw(self) -> int:
        """0 <= seed < 2**63."""
        if self._seed is None:
            return secrets.randbits(63)
        self._drawn += 1
        digest = hashlib.blake2b(f"{self._seed} {self._drawn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for absent fields: generation_config.json's where the settings want them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What validation must know of the model. `context`: tokens a sequence may hold, prompt and output."""

    vocab: int
    context: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StopRules:
    """When text ends. `strings` are sought in the text, the ids are the engine's business."""

    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    hidden_ids: tuple[int, ...] = ()
    include: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request: `sampling` is complete but for max_tokens and the choice's seed."""

    sampling: SamplingParams
    n: int
    max_tokens: int | None  # None = to the end of the context
    stop: StopRules
    skip_special_tokens: bool
    priority: int
    cache_salt: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    seeded: bool
    echo: bool = False

    def for_choice(self, k: int, max_tokens: int, seeds: Seeds) -> SamplingParams:
        """Choice k's parameters. Choices of one request differ in seed, yet all follow from the request's."""
        seed = (self.sampling.seed + k) % 2**63 if self.seeded else seeds.draw()
        return msgspec.structs.replace(
            self.sampling,
            max_tokens=max_tokens,
            min_tokens=min(self.sampling.min_tokens, max_tokens),
            seed=seed,
        )


def check_generation(
    fields: GenerationFields,
    defaults: SamplingDefaults,
    limits: ModelLimits,
    config: EngineConfig,
    *,
    max_tokens: int | None,
    logprobs: int,
) -> Generation:
    """Validate what both endpoints share; length and logprobs come resolved from the endpoint's own fields."""
    for name, (least, greatest) in RANGES.items():
        _check_range(name, getattr(fields, name), least, greatest)
    n = _check_n(fields.n, config.server.max_n)
    if fields.best_of is not None and fields.best_of != n:
        raise invalid(
            f"'best_of' must equal 'n' ({n}); ranking more answers is not supported.",
            "best_of",
            "unsupported_parameter",
        )
    stop = _check_stop(fields, limits, config.server)
    min_tokens = fields.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(
            f"'min_tokens' {min_tokens} is above 'max_tokens' {max_tokens}.", "min_tokens"
        )
    if fields.priority and config.scheduler.policy != "priority":
        raise invalid(
            "'priority' needs a server started with the priority scheduling policy.", "priority"
        )
    stream = bool(fields.stream)
    options = fields.stream_options
    if options is not None and not stream:
        raise invalid("'stream_options' needs 'stream': true.", "stream_options")
    temperature = _default(fields.temperature, defaults.temperature)
    top_k = _default(fields.top_k, defaults.top_k)
    sampling = SamplingParams(
        min_tokens=min_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=0 if top_k < 0 or top_k >= limits.vocab else top_k,
        top_p=max(_default(fields.top_p, defaults.top_p), SMALLEST_TOP_P),
        min_p=_default(fields.min_p, defaults.min_p),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_default(fields.repetition_penalty, defaults.repetition_penalty),
        logit_bias=check_logit_bias(fields.logit_bias, limits.vocab),
        seed=fields.seed or 0,
        logprobs=logprobs,
        stop_token_ids=stop.token_ids,
        hidden_stop_ids=stop.hidden_ids,
    )
    return Generation(
        sampling=sampling,
        n=n,
        max_tokens=max_tokens,
        stop=stop,
        skip_special_tokens=fields.skip_special_tokens is not False,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        stream=stream,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        seeded=fields.seed is not None,
    )


def check_max_tokens(value: int | None, name: str, least: int) -> int | None:
    """A length field: None stays None."""
    if value is not None and not least <= value <= INT32_MAX:
        raise invalid(f"'{name}' must be from {least} to {INT32_MAX}, not {value}.", name)
    return value


def room_for(prompt_len: int, max_tokens: int | None, context: int, param: str) -> int:
    """Tokens that may be generated. Raises 400 context_length_exceeded when not even one fits."""
    if prompt_len >= context:
        raise too_long(str(prompt_len), context, param)
    room = context - prompt_len
    return room if max_tokens is None else min(room, max_tokens)


def too_long(prompt_len: str, context: int, param: str) -> ApiError:
    return invalid(
        f"The model's context is {context} tokens, prompt and output together, and the prompt has "
        f"{prompt_len} tokens; shorten it to {context - 1} or fewer.",
        param,
        "context_length_exceeded",
    )


def check_logit_bias(bias: dict[str, float] | None, vocab: int) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > MAX_BIAS_ENTRIES:
        raise invalid(
            f"'logit_bias' has {len(bias)} entries; at most {MAX_BIAS_ENTRIES} are allowed.",
            "logit_bias",
        )
    checked: dict[int, float] = {}
    for key, value in bias.items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 12 else -1
        if not 0 <= token < vocab:
            raise invalid(
                f"'logit_bias': key '{key[:32]}' is not a token id from 0 to {vocab - 1}.",
                "logit_bias",
            )
        if not -100.0 <= value <= 100.0:
            raise invalid(
                f"'logit_bias': {value:g} for token {key} is not from -100 to 100.", "logit_bias"
            )
        checked[token] = value
    return checked


def check_logprobs(value: int | None, name: str, limit: int) -> int:
    """-1 = off, 0 = the chosen token alone, k = and the k likeliest."""
    if value is None:
        return -1
    if not 0 <= value <= limit:
        raise invalid(f"'{name}' must be from 0 to {limit}, not {value}.", name)
    return value


def check_token_ids(ids: Sequence[int], vocab: int, param: str) -> None:
    """Every id is an integer of the vocabulary; the error names the first index that is not."""
    for index, token in enumerate(ids):
        if type(token) is not int:
            raise invalid(f"'{param}[{index}]' must be a token id.", f"{param}[{index}]")
        if not 0 <= token < vocab:
            raise invalid(
                f"'{param}[{index}]': {_short(token)} is not a token id from 0 to {vocab - 1}.",
                f"{param}[{index}]",
            )


def _check_range(name: str, value: float | None, least: float, greatest: float) -> None:
    if value is not None and not least <= value <= greatest:
        raise invalid(f"'{name}' must be from {least} to {greatest}, not {_short(value)}.", name)


def _check_n(n: int | None, limit: int) -> int:
    if n is None:
        return 1
    if not 1 <= n <= limit:
        raise invalid(f"'n' must be from 1 to {limit}, not {_short(n)}.", "n")
    return n


def _check_stop(fields: GenerationFields, limits: ModelLimits, server: ServerSettings) -> StopRules:
    stop = fields.stop
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > server.max_stop:
        raise invalid(
            f"'stop' has {len(strings)} strings; at most {server.max_stop} are allowed.", "stop"
        )
    for index, text in enumerate(strings):
        where = "stop" if isinstance(stop, str) else f"stop[{index}]"
        if not text:
            raise invalid(f"'{where}' is empty; leave it out to have no stop string.", where)
        if len(text.encode()) > server.max_stop_bytes:
            raise invalid(f"'{where}' is longer than {server.max_stop_bytes} bytes.", where)
    given = tuple(dict.fromkeys(fields.stop_token_ids or ()))
    if len(given) > MAX_STOP_IDS:
        raise invalid(
            f"'stop_token_ids' has {len(given)} ids; at most {MAX_STOP_IDS} are allowed.",
            "stop_token_ids",
        )
    check_token_ids(given, limits.vocab, "stop_token_ids")
    eos = () if fields.ignore_eos else limits.eos_token_ids
    ids = tuple(dict.fromkeys((*eos, *given)))
    include = bool(fields.include_stop_str_in_output)
    return StopRules(strings, ids, () if include else ids, include)


def _default(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _short(value: float) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else text[:21] + "..."
