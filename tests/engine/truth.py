"""What transformers' greedy generate would say, at the price of one forward a prompt.

An answer equals that of generate exactly if each of its tokens is the argmax of the logits behind the prompt and the
tokens before it: so the whole answer is checked at once. `generate` itself is there too, for some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.engine.core.sampling import SamplingParams
from tests.engine.driver import Answer

# A choice between logits closer than this is not the same on every machine, nor in every order of summation.
TIE = 1e-4


@dataclass
class Truth:
    model: Any
    prompts: list[list[int]]
    params: list[SamplingParams]
    ties_allowed: int = 1  # in all answers of one run together
    _known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def check(self, answers: Sequence[Answer]) -> None:
        """Every answer is complete and is the truth's."""
        ties = 0
        for prompt, params, got in zip(self.prompts, self.params, answers, strict=True):
            assert (got.reason, got.error) == ("length", "")
            assert len(got.tokens) == params.max_tokens
            ties += self._ties(prompt, params, got.tokens)
        assert ties <= self.ties_allowed

    @torch.inference_mode()
    def _ties(self, prompt: list[int], params: SamplingParams, answer: list[int]) -> int:
        key = (*prompt, *answer, int(1e6 * params.repetition_penalty))
        if key not in self._known:
            tokens = torch.tensor([prompt + answer])
            logits = self.model(tokens).logits[0, len(prompt) - 1 : -1].double()
            if params.repetition_penalty != 1.0:
                logits = penalised(logits, tokens[0], len(prompt), params.repetition_penalty)
            own = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
            gaps = logits.max(-1).values - own
            wrong = [f"token {i}: {gaps[i]:.2g}" for i in range(len(answer)) if gaps[i] > TIE]
            assert not wrong, f"prompt of {len(prompt)} tokens, below the best by: {wrong[0]}"
            self._known[key] = int((gaps > 0).sum())
        return self._known[key]

    def generate(self, index: int) -> list[int]:
        """transformers' own answer to one prompt."""
        params, ids = self.params[index], torch.tensor([self.prompts[index]])
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_tokens,
            do_sample=False,
            repetition_penalty=params.repetition_penalty,
            eos_token_id=None,
            pad_token_id=0,
        )
        answer: list[int] = output[0, ids.shape[1] :].tolist()
        return answer


def penalised(
    logits: torch.Tensor, tokens: torch.Tensor, prompt_len: int, penalty: float
) -> torch.Tensor:
    """logits [N, V] behind the first prompt_len, prompt_len + 1, ... of `tokens`."""
    logits = logits.clone()
    for i, row in enumerate(logits):
        seen = tokens[: prompt_len + i].unique()
        own = row[seen]
        row[seen] = torch.where(own > 0, own / penalty, own * penalty)
    return logits
