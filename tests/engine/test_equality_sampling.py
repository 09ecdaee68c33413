"""What else an answer must not depend on the engine for: seeded draws, penalties, log-probabilities."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.core.sampling import SamplingParams
from tests.engine.driver import Answer, LocalEngine, greedy
from tests.engine.tiny_models import VOCAB, make_tiny, prompt

TOKENS = 24
SEEDED = SamplingParams(temperature=0.8, seed=42, max_tokens=TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mistral")
    make_tiny("mistral", path)
    return path


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.3, top_p=0.95, seed=seed, max_tokens=TOKENS)


def test_a_seed_gives_the_same_text_in_any_company(folder: Path) -> None:
    own = prompt(20)
    with LocalEngine(folder) as engine:
        alone = engine.run([own], SEEDED)[0].tokens
        for mates in range(1, 5):
            prompts = [prompt(9 * i + 1) for i in range(mates)]
            params = [sampled(1000 * mates + i) for i in range(mates)]
            assert engine.run([*prompts, own], [*params, SEEDED])[-1].tokens == alone
    assert len(set(alone)) > 5


def test_seeds_matter(folder: Path) -> None:
    """Five of one prompt at once, all of unlike seeds; the same five again."""
    with LocalEngine(folder) as engine:
        first = [
            answer.tokens for answer in engine.run([prompt(20)] * 5, list(map(sampled, range(5))))
        ]
        again = [
            answer.tokens for answer in engine.run([prompt(20)] * 5, list(map(sampled, range(5))))
        ]
    assert len({tuple(tokens) for tokens in first}) == 5
    assert again == first


def test_chunks_and_preemption_do_not_change_draws(folder: Path) -> None:
    prompts = [prompt(length) for length in (3, 17, 40, 64, 90)] * 2
    params = list(map(sampled, range(10)))
    with LocalEngine(folder) as engine:
        want = [answer.tokens for answer in engine.run(prompts, params)]
    for settings in (
        {"max_num_batched_tokens": 16},
        {"prefix_caching": False, "overlap": False},
        {"max_num_seqs": 2, "policy": "priority", "max_num_batched_tokens": 32},
    ):
        with LocalEngine(folder, **settings) as engine:
            answers = engine.run(prompts, params, steps_between=4)
            assert [answer.tokens for answer in answers] == want
            assert engine.scheduler.stats().preemptions > 0 or "policy" not in settings


def mixed(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share beginnings, with every kind of parameter."""
    order = random.Random(7)
    stems = [prompt(length, seed=3) for length in (16, 33, 48)]
    kinds: list[dict[str, Any]] = [
        {},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.5, "logprobs": 2},
        {"logit_bias": {3: 4.0, 5: -100.0}, "logprobs": 0},
        {"prompt_logprobs": 1},
        {"min_tokens": 6, "stop_token_ids": tuple(range(0, VOCAB, 3))},
    ]
    prompts = [
        order.choice(stems) + [order.randrange(VOCAB) for _ in range(order.randrange(1, 9))]
        for _ in range(count)
    ]
    params = [
        greedy(8, **kinds[i % len(kinds)])
        if i % 2
        else SamplingParams(max_tokens=8, seed=i, **kinds[order.randrange(len(kinds))])
        for i in range(count)
    ]
    return prompts, params


def test_cache_on_equals_cache_off(folder: Path) -> None:
    prompts, params = mixed(200)
    found: dict[bool, list[Answer]] = {}
    for caching in (False, True):
        with LocalEngine(folder, prefix_caching=caching, max_num_batched_tokens=64) as engine:
            found[caching] = engine.run(prompts, params)
            hits = engine.scheduler.stats().prefix_hits
            assert (hits > 1000) is caching
    for own, off, on in zip(params, found[False], found[True], strict=True):
        assert (on.tokens, on.reason) == (off.tokens, off.reason)
        assert len(on.tokens) > own.min_tokens
        assert 5 not in on.tokens or 5 not in own.logit_bias
        for kind in ("logprobs", "prompt_logprobs"):
            pairs = zip(getattr(on, kind), getattr(off, kind), strict=True)
            for cached, plain in pairs:
                assert (cached.token_id, cached.rank) == (plain.token_id, plain.rank)
                assert cached.logprob == pytest.approx(plain.logprob, abs=1e-4)
