"""Sampling parameters as the scheduler and the workers see them: validated, resolved, plain. Torch-free."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request's sampling. The API has validated every field; None never appears where a number is meant.

    Token ids are valid for the model. `seed` is always set: the API draws one when the client gave none, so that a
    request's randomness is a pure function of (seed, position) whatever its batch mates, preemption or device.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # below 1e-3 the API sends exactly 0.0: greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0  # counts output tokens only
    frequency_penalty: float = 0.0  # counts output tokens only
    repetition_penalty: float = 1.0  # counts prompt and output tokens
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int = 0  # 0 <= seed < 2**63
    logprobs: int = -1  # -1 = off; 0 = the chosen token only; k = and the k likeliest
    prompt_logprobs: int = -1  # the same for prompt tokens
    stop_token_ids: tuple[int, ...] = ()  # end-of-text ids included unless ignore_eos
    hidden_stop_ids: tuple[int, ...] = ()  # of those, the ones whose text is never shown

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )
