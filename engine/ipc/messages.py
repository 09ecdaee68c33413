"""Messages between the API process and the engine process: msgspec structs in msgpack, never pickle."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.step import TokenLogprobs

SLEEP_TAGS = ("weights", "kv_cache")  # what can sleep, in the order in which it wakes


class Submit(msgspec.Struct, tag="submit"):
    """One sequence to generate. `n` choices are n Submits that share a prompt (and so its KV blocks)."""

    request_id: str
    token_ids: bytes  # int32 little-endian, at least one token
    sampling: SamplingParams
    priority: int = 0  # lower runs earlier; used by the priority policy
    cache_salt: str = ""
    adapter_id: int = 0
    arrival: float = 0.0  # time.monotonic() of the API process (one host: one clock)


class Abort(msgspec.Struct, tag="abort"):
    request_ids: list[str]


class Call(msgspec.Struct, tag="call"):
    """A utility call: "stats", "selection", "sleep", "wake", ... Answered by CallReply."""

    call_id: int
    method: str
    args: dict[str, Any] = {}


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Stop at once; requests still there are answered with finish_reason "abort"."""


ToEngine = Submit | Abort | Call | Shutdown


class RequestOutput(msgspec.Struct, omit_defaults=True, gc=False):
    """New tokens of one request. The last one has a finish_reason. Many are made a step, and none is part of a cycle:
    the collector need not look at them."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []  # as many as token_ids when asked for
    prompt_logprobs: list[TokenLogprobs] = []  # with the first output, prompt_len - 1 entries
    finish_reason: str = ""  # "" | "stop" | "length" | "abort" | "error"
    stop_token_id: int = -1  # the token that ended it; it is the last of token_ids
    cached_tokens: int = 0  # of the prompt, found in the prefix cache; set with the first output
    # a sentence for the client when finish_reason is "error", or "abort" by an engine that sleeps
    error: str = ""
    queued_s: float = 0.0  # submit to first schedule; set with the first output


class Outputs(msgspec.Struct, tag="outputs"):
    outputs: list[RequestOutput]


class Stats(msgspec.Struct, tag="stats"):
    """Gauges and counters since start; sent at most every 0.1 s while busy and once when idle begins."""

    running: int = 0
    waiting: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # prompt tokens found
    prompt_tokens: int = 0  # prompt tokens computed
    generated_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    graphs: int = 0  # steps of so many sizes are captured
    graphs_planned: int = 0
    sleeping: bool = False  # requests are refused until it wakes


class EngineProgress(msgspec.Struct, tag="progress"):
    phase: str
    done: float
    total: float
    text: str = ""


class EngineReady(msgspec.Struct, tag="ready"):
    """Everything the API and the start-up panel need to know of the running engine."""

    device: str  # DeviceInfo.spec
    device_name: str
    dtype: str
    kv_dtype: str
    max_model_len: int
    block_size: int
    kv_bytes: int
    kv_tokens: int  # tokens the full-attention group can hold
    max_num_seqs: int
    max_num_batched_tokens: int
    weight_bytes: int
    world: int
    selection: list[dict[str, Any]]
    phases: dict[str, float]  # seconds of each phase
    notes: list[str] = []  # decisions with reasons, e.g. the context length chosen
    # on each device at start: weights, a step, KV cache and what is left; 0 = not known
    free_bytes: int = 0
    step_bytes: int = 0  # the largest step's memory and captured steps'
    graphs: int = 0  # that will be captured while the engine runs


class EngineFailed(msgspec.Struct, tag="failed"):
    """The engine ends. Every request in flight has failed."""

    message: str


class CallReply(msgspec.Struct, tag="reply"):
    call_id: int
    result: Any = None
    error: str = ""


FromEngine = Outputs | Stats | EngineProgress | EngineReady | EngineFailed | CallReply

encoder = msgspec.msgpack.Encoder()
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)
