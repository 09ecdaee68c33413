"""Request: one sequence in the engine, from the door to its last token."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.step import TokenLogprobs
from headrace.engine.kv_cache.cache import SequenceBlocks

NO_ROW = -1


@dataclass(slots=True, eq=False)
class Request:
    """A request waits (in the queue, no row), runs (a row, blocks) or is finished (neither, for good).

    How far a running request has come is kept in the scheduler's arrays, by row.
    """

    request_id: str
    sampling: SamplingParams
    tokens: array[int]  # prompt and the outputs known so far
    prompt_len: int
    limit: int  # tokens in total at which it ends: prompt + max_tokens, clamped to the context
    blocks: SequenceBlocks
    number: int  # order of arrival
    priority: int = 0
    adapter_id: int = 0
    arrival: float = 0.0
    row: int = NO_ROW
    finished: bool = False
    in_flight: int = 0  # submitted steps with this request whose results are not here yet
    answered: bool = False  # the first output is out, with what only the first one carries
    scheduled: bool = False  # has had a row at least once
    cached_tokens: int = 0
    queued_s: float = 0.0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling.prompt_logprobs >= 0 and not self.answered

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len
