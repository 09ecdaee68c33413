"""Several CPU processes give the tokens of one: shared and replicated heads, a vocabulary that does not divide."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.core.executor import WorkerFailed
from headrace.engine.core.sampling import SamplingParams
from tests.engine import tiny_models
from tests.engine.driver import Answer, LocalEngine, greedy
from tests.engine.tiny_models import make_tiny, prompt

# 99 tokens in every vocabulary: no number of ranks here divides it.
MODELS: dict[str, dict[str, Any]] = {
    "llama-mqa": {"model_type": "llama", "num_key_value_heads": 1},  # the one head is replicated
    "qwen2": {"model_type": "qwen2"},  # biases of q, k, v
    "gemma3": tiny_models.CONFIGS["gemma3"],  # windows, tied embedding, norms of q and k
    "qwen2_moe": tiny_models.CONFIGS["qwen2_moe"],  # experts shared out by their width, one for all
}
PROMPTS = [prompt(length) for length in (1, 16, 17, 40, 90)]
PARAMS = [
    greedy(24, repetition_penalty=1.4, logprobs=2),
    greedy(24),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=24),
    greedy(24, prompt_logprobs=1),
    SamplingParams(temperature=1.0, top_k=20, seed=8, max_tokens=24, logprobs=0),
]


def answers(folder: Path, world: int, **settings: Any) -> list[Answer]:
    with LocalEngine(
        folder, tensor_parallel_size=world, max_num_batched_tokens=32, **settings
    ) as engine:
        return engine.run(PROMPTS, PARAMS)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_two_ranks_give_the_tokens_of_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny_models.CONFIGS, name, MODELS[name])  # type: ignore[arg-type]
    make_tiny(name, tmp_path)
    alone, together = answers(tmp_path, 1), answers(tmp_path, 2)
    for one, two in zip(alone, together, strict=True):
        assert two.tokens == one.tokens
        for kind in ("logprobs", "prompt_logprobs"):
            pairs = zip(getattr(one, kind), getattr(two, kind), strict=True)
            for first, second in pairs:
                assert second.token_id == first.token_id
                assert second.logprob == pytest.approx(first.logprob, abs=1e-4)


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    with LocalEngine(tmp_path, tensor_parallel_size=2) as engine:
        first, second = (link._process for link in engine.executor._links)  # type: ignore[attr-defined]
        os.kill(second.pid, signal.SIGKILL)
        with pytest.raises(WorkerFailed, match=r"worker 1 died: .*SIGKILL|worker 0: a step failed"):
            engine.run(PROMPTS, PARAMS)
        assert first.returncode is not None and second.returncode is not None


def test_heads_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    engine = LocalEngine(tmp_path, tensor_parallel_size=4)
    with pytest.raises(WorkerFailed, match="6 attention heads cannot be divided over 4 workers"):
        engine.__enter__()


@pytest.mark.model
@pytest.mark.slow
def test_three_ranks_of_smollm2(smollm2_gguf: Path) -> None:
    """Nine query heads and three key/value heads: one of the latter a rank."""
    settings = {"max_num_seqs": 4, "block_size": 32}
    alone = answers(smollm2_gguf, 1, **settings)
    together = answers(smollm2_gguf, 3, **settings)
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
