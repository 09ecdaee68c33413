"""Token for token what transformers' generate gives, in float32, whatever the engine does with batches and blocks.

Tiny random models of every family: sliding windows of 16 tokens, rope scalings past their old limits, soft caps.
Half of the prompts carry a repetition penalty: random models without one soon repeat a single token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.engine.driver import LocalEngine, greedy
from tests.engine.tiny_models import make_tiny, prompt
from tests.engine.truth import Truth

NEW_TOKENS = 64
LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 31, 32, 33, 34, 47, 55, 64, 65, 89, 144)
PENALTY = 4.0  # tied embeddings make a random model repeat its last token at almost any price

FAMILIES = (
    "llama",
    "llama-llama3",
    "llama-yarn",
    "mistral",
    "qwen2",
    "qwen2-windowed",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gemma2",
    "gemma3",
)


@dataclass
class TinyTruth(Truth):
    folder: Path = Path()


@pytest.fixture(scope="module", params=FAMILIES)
def truth(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyTruth:
    torch.set_num_threads(1)  # tiny products: more threads only wait for each other
    folder = tmp_path_factory.mktemp(request.param)
    model = make_tiny(request.param, folder).truth
    penalties = [PENALTY if i % 2 else 1.0 for i in range(len(LENGTHS))]
    return TinyTruth(
        model,
        [prompt(length) for length in LENGTHS],
        [greedy(NEW_TOKENS, repetition_penalty=penalty) for penalty in penalties],
        folder=folder,
    )


def test_alone(truth: TinyTruth) -> None:
    with LocalEngine(truth.folder, max_num_seqs=1) as engine:
        pairs = zip(truth.prompts, truth.params, strict=True)
        answers = [engine.run([own], params)[0] for own, params in pairs]
    truth.check(answers)
    for index in (8, 17):
        assert answers[index].tokens == truth.generate(index)
    assert sum(len(set(answer.tokens)) for answer in answers) > 10 * len(answers)


@pytest.mark.parametrize(
    ("chunk", "prefix_caching", "overlap"),
    [(16, True, True), (16, False, False), (512, True, False), (512, False, True)],
)
def test_batch_of_16(truth: TinyTruth, chunk: int, prefix_caching: bool, overlap: bool) -> None:
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
def test_preempted_for_memory(truth: TinyTruth, prefix_caching: bool) -> None:
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
def test_displaced_by_urgent_ones(truth: TinyTruth, prefix_caching: bool) -> None:
    """Three rows, and every third step a request comes that takes one of them."""
    with LocalEngine(
        truth.folder, max_num_seqs=3, policy="priority", prefix_caching=prefix_caching
    ) as engine:
        truth.check(engine.run(truth.prompts, truth.params, steps_between=3))
        assert engine.scheduler.stats().preemptions >= 10
