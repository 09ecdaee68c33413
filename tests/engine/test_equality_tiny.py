"""Token for token what transformers' generate gives, in float32, whatever the engine does with batches and blocks.

Tiny random models of every family: sliding windows of 16 tokens, rope scalings past their old limits, soft caps.
Half of the prompts carry a repetition penalty: random models without one soon repeat a single token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.core.sampling import SamplingParams
from tests.engine.driver import Answer, LocalEngine, greedy
from tests.engine.tiny_models import make_tiny, prompt

NEW_TOKENS = 64
LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 31, 32, 33, 34, 47, 55, 64, 65, 89, 144)
PENALTY = 1.4
# A choice between logits closer than this is not the same on every machine, nor in every order of summation.
TIE = 1e-4

FAMILIES = (
    "llama",
    "llama-llama3",
    "llama-yarn",
    "mistral",
    "qwen2",
    "qwen2-windowed",
    "qwen3",
    "gemma2",
    "gemma3",
)


@dataclass
class Truth:
    folder: Path
    model: Any
    prompts: list[list[int]]
    answers: list[list[int]]
    params: list[SamplingParams]

    def check(self, answers: Sequence[Answer]) -> None:
        ties = 0
        for own, want, params, got in zip(
            self.prompts, self.answers, self.params, answers, strict=True
        ):
            assert (got.reason, got.error) == ("length", "")
            if got.tokens != want:
                at = next(
                    i
                    for i, pair in enumerate(zip(got.tokens, want, strict=True))
                    if len(set(pair)) > 1
                )
                gap = self._gap(own + want[:at], params, got.tokens[at], want[at])
                assert gap < TIE, f"prompt of {len(own)}: token {at} differs, gap {gap:.2g}"
                ties += 1
        assert ties <= 1

    @torch.inference_mode()
    def _gap(self, tokens: list[int], params: SamplingParams, first: int, second: int) -> float:
        logits = self.model(torch.tensor([tokens])).logits[0, -1].double()
        seen = torch.tensor(sorted(set(tokens)))
        own, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(own > 0, own / penalty, own * penalty)
        return float((logits[first] - logits[second]).abs())


def generate(model: Any, tokens: list[int], penalty: float) -> list[int]:
    ids = torch.tensor([tokens])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        repetition_penalty=penalty,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer: list[int] = output[0, len(tokens) :].tolist()
    return answer


@pytest.fixture(scope="module", params=FAMILIES)
def truth(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    torch.set_num_threads(1)  # tiny products: more threads only wait for each other
    folder = tmp_path_factory.mktemp(request.param)
    model = make_tiny(request.param, folder).truth
    prompts = [prompt(length) for length in LENGTHS]
    penalties = [PENALTY if i % 2 else 1.0 for i in range(len(prompts))]
    answers = [generate(model, own, p) for own, p in zip(prompts, penalties, strict=True)]
    params = [greedy(NEW_TOKENS, repetition_penalty=p) for p in penalties]
    assert sum(len(set(answer)) for answer in answers) > 10 * len(answers)
    return Truth(folder, model, prompts, answers, params)


def test_alone(truth: Truth) -> None:
    with LocalEngine(truth.folder, max_num_seqs=1) as engine:
        pairs = zip(truth.prompts, truth.params, strict=True)
        truth.check([engine.run([own], params)[0] for own, params in pairs])


@pytest.mark.parametrize(
    ("chunk", "prefix_caching", "overlap"),
    [(16, True, True), (16, False, False), (512, True, False), (512, False, True)],
)
def test_batch_of_16(truth: Truth, chunk: int, prefix_caching: bool, overlap: bool) -> None:
    """Twice: with the cache, the second time finds blocks of the first."""
    with LocalEngine(
        truth.folder,
        max_num_batched_tokens=chunk,
        prefix_caching=prefix_caching,
        overlap=overlap,
    ) as engine:
        truth.check(engine.run(truth.prompts, truth.params))
        if prefix_caching:
            again = engine.run(truth.prompts, truth.params)
            truth.check(again)
            assert sum(answer.cached for answer in again) > 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_for_memory(truth: Truth, prefix_caching: bool) -> None:
    """A pool that holds one and a half of the longest: rows are taken back and recomputed many times."""
    with LocalEngine(
        truth.folder,
        num_blocks=24,
        max_num_batched_tokens=64,
        prefix_caching=prefix_caching,
    ) as engine:
        truth.check(engine.run(truth.prompts, truth.params))
        # With windows in every layer a request never holds more than a few blocks.
        assert engine.scheduler.stats().preemptions > 0 or engine.plan.groups[0].window


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_displaced_by_urgent_ones(truth: Truth, prefix_caching: bool) -> None:
    """Three rows, and every third step a request comes that takes one of them."""
    with LocalEngine(
        truth.folder, max_num_seqs=3, policy="priority", prefix_caching=prefix_caching
    ) as engine:
        truth.check(engine.run(truth.prompts, truth.params, steps_between=3))
        assert engine.scheduler.stats().preemptions >= 10
