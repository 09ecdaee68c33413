"""Sampling of a real model through the official client: the cases 36, 37, 39, 41, 42 and 44."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import ModelServer

pytestmark = pytest.mark.model

PROMPT = "Once upon a time"


def text(
    server: ModelServer, prompt: str = PROMPT, extra: dict[str, Any] | None = None, **fields: Any
) -> str:
    fields = {"max_tokens": 12, **fields}
    answer = server.client.completions.create(
        model=server.model, prompt=prompt, extra_body=extra, **fields
    )
    return answer.choices[0].text


def first_tokens(server: ModelServer, count: int) -> list[int]:
    """Ids of the greedy continuation."""
    words = text(server, temperature=0, max_tokens=count)
    body = {"prompt": words, "add_special_tokens": False}
    return server.http.post("/tokenize", json=body).json()["tokens"]


def token_of(server: ModelServer, words: str) -> int:
    """Id of a text of one token."""
    body = {"prompt": words, "add_special_tokens": False}
    (token,) = server.http.post("/tokenize", json=body).json()["tokens"]
    return token


def test_case_36_a_seed_does_not_depend_on_batch_mates(smollm2: ModelServer) -> None:
    fields: dict[str, Any] = {"seed": 42, "temperature": 0.8}
    alone = text(smollm2, **fields)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(2):
            mates = [
                threads.submit(text, smollm2, f"{PROMPT} {n}", temperature=1.0, max_tokens=20)
                for n in range(3)
            ]
            assert text(smollm2, **fields) == alone
            for mate in mates:
                mate.result()


def test_case_37_seeds(smollm2: ModelServer) -> None:
    seeded = {text(smollm2, seed=7, temperature=1.0) for _ in range(3)}
    assert len(seeded) == 1
    assert text(smollm2, seed=8, temperature=1.0) not in seeded
    with ThreadPoolExecutor(5) as threads:
        unseeded = list(threads.map(lambda _: text(smollm2, temperature=1.0), range(5)))
    assert len(set(unseeded)) == 5
    many = smollm2.client.completions.create(
        model=smollm2.model, prompt=PROMPT, n=4, seed=7, temperature=1.0, max_tokens=12
    )
    assert len({choice.text for choice in many.choices}) == 4
    assert many.choices[0].text in seeded


def test_case_39_tiny_temperatures(smollm2: ModelServer) -> None:
    greedy = text(smollm2, temperature=0)
    assert greedy.strip()
    for temperature in (1e-12, 1e-6, 1e-5, 1e-4, 1e-3):
        assert text(smollm2, temperature=temperature) == greedy


@pytest.mark.parametrize(
    "fields",
    [
        {"extra": {"top_k": 1}},
        {"top_p": 1e-9},
        {"top_p": 0},
        {"extra": {"min_p": 1}},
        {"top_p": 0.01, "extra": {"top_k": 10**9}},
    ],
)
def test_case_41_the_narrow_ends_are_greedy(smollm2: ModelServer, fields: dict[str, Any]) -> None:
    assert text(smollm2, temperature=1.0, seed=3, **fields) == text(smollm2, temperature=0)


def test_case_41_off_is_off(smollm2: ModelServer) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    free = text(smollm2, **fields)
    for extra in ({"top_k": -1}, {"top_k": 0}, {"top_k": 49152}, {"top_k": 10**9}, {"min_p": 0}):
        assert text(smollm2, extra=extra, **fields) == free
    assert text(smollm2, top_p=1, **fields) == free


def test_case_42_penalties(smollm2: ModelServer) -> None:
    """Presence and frequency leave prompt tokens alone, so the first token of the answer never changes."""
    prompt = "The cat sat on the mat. The cat sat on the mat. The cat sat on the"
    free = text(smollm2, prompt, temperature=0, max_tokens=1)
    assert free == " mat"
    for fields in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        assert text(smollm2, prompt, temperature=0, max_tokens=1, **fields) == free
        longer = text(smollm2, prompt, temperature=0, max_tokens=12, **fields)
        assert longer == text(smollm2, prompt, temperature=0, max_tokens=12, **fields)  # now cached
    comma = {str(token_of(smollm2, ",")): 12}  # a token that comes again and again
    commas = [
        text(
            smollm2, temperature=0, max_tokens=24, logit_bias=comma, frequency_penalty=penalty
        ).count(",")
        for penalty in (0.0, 2.0)
    ]
    assert commas[1] < commas[0]
    strong: dict[str, Any] = {"extra": {"repetition_penalty": 10.0}}
    assert text(smollm2, prompt, temperature=0, max_tokens=1, **strong) != free


def test_case_44_logit_bias(smollm2: ModelServer) -> None:
    greedy = text(smollm2, temperature=0)
    (first, *_) = first_tokens(smollm2, 3)
    assert text(smollm2, temperature=0, logit_bias={}) == greedy
    banned = text(smollm2, temperature=0, logit_bias={str(first): -100})
    assert banned != greedy
    comma = token_of(smollm2, ",")
    assert text(smollm2, temperature=0, logit_bias={str(comma): 100}, max_tokens=4) == ",,,,"
    end = {"0": -100, "2": -100}  # the model's ends of text
    long = text(smollm2, "Answer: no.", temperature=0, logit_bias=end, max_tokens=30)
    assert long and "<|" not in long


def test_min_tokens_and_ignore_eos(smollm2: ModelServer) -> None:
    messages: list[Any] = [{"role": "user", "content": "Reply with the word yes."}]

    def used(**extra: Any) -> int:
        answer = smollm2.client.chat.completions.create(
            model=smollm2.model,
            messages=messages,
            temperature=0,
            max_tokens=48,
            extra_body=extra,
        )
        return answer.usage.completion_tokens

    assert used(ignore_eos=True) == 48
    assert used(min_tokens=40) >= 40
