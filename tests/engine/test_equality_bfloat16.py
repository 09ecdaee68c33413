"""bfloat16 against transformers' float32: log-probabilities within a tolerance, choices equal where it matters.

The tolerance is absolute, in natural logarithms. bfloat16 has 8 bits of mantissa: a logit of size 10 is known to
0.04 at best, and every layer adds its rounding. The bound is some twice the largest difference seen over all
families; a missing term (a wrong rope scaling, a window off by one) makes differences of whole units.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.driver import LocalEngine, greedy
from tests.engine.tiny_models import make_tiny, prompt

TOLERANCE = 0.15
# On both sides of a block's end and of a step's 32 tokens, and up to several steps.
LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 90, 127, 150)
FAMILIES = ("llama", "llama-llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_choices(family: str, tmp_path: Path) -> None:
    tiny = make_tiny(family, tmp_path)
    prompts = [prompt(length) for length in LENGTHS]
    with LocalEngine(tmp_path, dtype="bfloat16", max_num_batched_tokens=32) as engine:
        answers = engine.run(prompts, greedy(64, logprobs=1, prompt_logprobs=1))
    decided = 0
    for own, answer in zip(prompts, answers, strict=True):
        truth = tiny.logits(own + answer.tokens).log_softmax(-1)
        entries = answer.prompt_logprobs + answer.logprobs
        assert [entry.token_id for entry in entries] == (own + answer.tokens)[1:]
        for entry, row in zip(entries, truth[:-1], strict=True):
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=TOLERANCE)
            best, second = row.topk(2).values.tolist()
            if best - second > TOLERANCE:
                assert entry.top_ids == [int(row.argmax())]
                decided += 1
    assert decided > 1000
