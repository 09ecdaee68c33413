"""The demo as a newcomer has it: the device's own dtype, computing on the file's blocks.

Exact equalities are tested in float32 (test_model_sampling.py, test_equality_*.py). Here: what is cached, and which
kernels a prompt goes through, changes log-probabilities by little and the text of clear answers not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.e2e.live_server import LiveServer, live_server

pytestmark = pytest.mark.model

QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "What is gravity?",
    "How many days has a week?",
    "Name three colours.",
)
# Of a log-probability: bfloat16 activations through 30 layers. Measured: 0.05 to 0.18 over eight questions with kernels
# whose products are exact to 0.2 %; in float32 the same requests differ by less than 0.001.
TOLERANCE = 0.25


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("defaults")
    with live_server(smollm2_gguf, folder, "--max-model-len", "2048") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none")


def test_the_capital_of_france_cold_and_cached(client: OpenAI) -> None:
    model = client.models.list().data[0].id
    answers, cached = [], []
    for _ in range(3):
        reply = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTIONS[0]}],
            temperature=0,
            max_tokens=16,
        )
        answers.append(reply.choices[0].message.content)
        cached.append(reply.usage.prompt_tokens_details.cached_tokens)
    assert "Paris" in answers[0]
    assert answers == [answers[0]] * 3
    assert cached[0] == 0 < cached[1] == cached[2]


@pytest.mark.parametrize("question", QUESTIONS)
def test_cached_log_probabilities_are_those_of_a_cold_prompt(client: OpenAI, question: str) -> None:
    model = client.models.list().data[0].id

    def first(salt: str) -> dict[str, float]:
        reply = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=1,
            logprobs=True,
            top_logprobs=10,
            extra_body={"cache_salt": salt},
        )
        return {row.token: row.logprob for row in reply.choices[0].logprobs.content[0].top_logprobs}

    cold, cached = first(question), first(question)
    shared = cold.keys() & cached.keys()
    assert len(shared) >= 8
    assert all(abs(cold[token] - cached[token]) <= TOLERANCE for token in shared)
