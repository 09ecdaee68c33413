"""A real model through the official client: the cases 14, 29, 31, 32, 33, 46, 59, 85, 88, 91, 95 and 120."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.e2e.conftest import ModelServer

pytestmark = pytest.mark.model

ALPHABET = "A B C D E F G H I J K L M"
CHATS = [
    "Say hello.",
    "What is the capital of France? Answer in one word.",
    "Schreib einen kurzen Satz mit ä, ö und ü.",
    "List three emoji: ",
]


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def complete(server: ModelServer, prompt: Any, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 16, **fields}
    return server.client.completions.create(model=server.model, prompt=prompt, **fields)


def streamed(server: ModelServer, prompt: Any, **fields: Any) -> tuple[str, str | None]:
    text, reason = "", None
    for chunk in complete(server, prompt, stream=True, **fields):
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason
    return text, reason


@pytest.mark.parametrize("prompt", CHATS)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 11}])
def test_chat_stream_equals_whole(
    smollm2: ModelServer, prompt: str, sampling: dict[str, Any]
) -> None:
    create = smollm2.client.chat.completions.create
    fields = {"model": smollm2.model, "messages": user(prompt), "max_tokens": 16, **sampling}
    whole = create(**fields)
    parts = list(create(stream=True, stream_options={"include_usage": True}, **fields))
    text = "".join(c.choices[0].delta.content or "" for c in parts if c.choices)
    assert text == whole.choices[0].message.content and text
    reasons = [c.choices[0].finish_reason for c in parts if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason and set(reasons[:-1]) == {None}
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert parts[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_answers_sensibly(smollm2: ModelServer) -> None:
    answer = smollm2.client.chat.completions.create(
        model=smollm2.model, messages=user(CHATS[1]), temperature=0, max_tokens=16
    )
    assert "Paris" in answer.choices[0].message.content


@pytest.mark.parametrize("first", [2, 5])
def test_case_14_stop_of_several_tokens(smollm2: ModelServer, first: int) -> None:
    free = complete(smollm2, ALPHABET, logprobs=0).choices[0]
    stop = "".join(free.logprobs.tokens[first : first + 3])
    before = free.text[: free.text.index(stop)]
    whole = complete(smollm2, ALPHABET, stop=stop).choices[0]
    assert (whole.text, whole.finish_reason) == (before, "stop")
    assert streamed(smollm2, ALPHABET, stop=[stop]) == (before, "stop")
    shown = complete(smollm2, ALPHABET, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert shown.choices[0].text == before + stop


def test_case_29_ids_and_lists(smollm2: ModelServer) -> None:
    ids = smollm2.http.post("/tokenize", json={"prompt": ALPHABET}).json()["tokens"]
    text = complete(smollm2, ALPHABET).choices[0].text
    assert complete(smollm2, ids).choices[0].text == text
    both = complete(smollm2, [ids, ids[:5]], n=2)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text == text
    assert both.usage.prompt_tokens == len(ids) + 5
    assert both.usage.completion_tokens == 4 * 16


def test_case_31_context_length(smollm2: ModelServer) -> None:
    last = complete(smollm2, [5] * (smollm2.context - 1), max_tokens=9)
    assert last.choices[0].finish_reason == "length" and last.usage.completion_tokens == 1
    for length in (smollm2.context, smollm2.context + 1, 3 * smollm2.context):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(smollm2, [5] * length)
        assert caught.value.code == "context_length_exceeded"
        assert str(length) in str(caught.value) and str(smollm2.context) in str(caught.value)


def test_case_32_more_than_the_cache_holds(smollm2: ModelServer) -> None:
    """Four requests of more than a quarter of the cache each: some wait or are preempted, none is harmed."""
    sentence = "The quick brown fox jumps over the lazy dog. " * 28

    def one(at: int) -> tuple[str, int, str]:
        extra = {"ignore_eos": True, "cache_salt": str(at)}
        answer = complete(smollm2, sentence, extra_body=extra)
        assert answer.usage.prompt_tokens > 256
        choice = answer.choices[0]
        return choice.text, answer.usage.completion_tokens, choice.finish_reason

    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(one, range(4)))
    assert together == [one(9)] * 4
    assert together[0][1:] == (16, "length")


@pytest.mark.parametrize("prompt", [ALPHABET, "Ünïcödé 😀 text", [1, 2, 3]])
def test_case_33_echo_with_logprobs(smollm2: ModelServer, prompt: Any) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 3}
    whole = complete(smollm2, prompt, **fields)
    logprobs = whole.choices[0].logprobs
    assert len(logprobs.tokens) == whole.usage.prompt_tokens + 3
    assert logprobs.token_logprobs[0] is None and None not in logprobs.token_logprobs[1:]
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    for token, value, top in list(
        zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    )[1:]:
        assert top[token] == value and len(top) <= 3  # fewer where texts are equal
    parts = [c.choices[0] for c in complete(smollm2, prompt, stream=True, **fields)]
    assert "".join(part.text for part in parts) == whole.choices[0].text
    for name in ("tokens", "text_offset"):
        joined = [v for part in parts if part.logprobs for v in getattr(part.logprobs, name)]
        assert joined == getattr(logprobs, name)
    if isinstance(prompt, str):
        assert whole.choices[0].text.startswith(prompt)


def test_echo_alone(smollm2: ModelServer) -> None:
    echoed = complete(smollm2, ALPHABET, echo=True, max_tokens=0)
    assert echoed.choices[0].text == ALPHABET and echoed.usage.completion_tokens == 0
    scored = complete(smollm2, ALPHABET, echo=True, max_tokens=0, logprobs=1)
    assert scored.choices[0].text == ALPHABET and scored.usage.completion_tokens == 0
    assert len(scored.choices[0].logprobs.tokens) == scored.usage.prompt_tokens


def test_case_46_49_chat_logprobs(smollm2: ModelServer) -> None:
    choice = smollm2.client.chat.completions.create(
        model=smollm2.model,
        messages=user("Write only: 😀 é"),
        temperature=0,
        max_tokens=12,
        logprobs=True,
        top_logprobs=3,
    ).choices[0]
    shown = [entry for entry in choice.logprobs.content if entry.bytes is not None]
    assert bytes(b for entry in shown for b in entry.bytes) == choice.message.content.encode()
    for entry in choice.logprobs.content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert entry.logprob == values[0]  # greedy


@pytest.mark.parametrize("seed", range(3))
def test_case_59_hot_text_streams_as_it_is(smollm2: ModelServer, seed: int) -> None:
    """High temperatures bring byte tokens in any order."""
    fields: dict[str, Any] = {"temperature": 3.0, "seed": seed, "max_tokens": 24}
    whole = complete(smollm2, "😀 你好", **fields)
    text, reason = streamed(smollm2, "😀 你好", **fields)
    assert (text, reason) == (whole.choices[0].text, whole.choices[0].finish_reason)


def test_case_85_system_and_developer(smollm2: ModelServer) -> None:
    def tokens(*roles: str) -> list[int]:
        messages = [{"role": role, "content": "Answer in French."} for role in roles]
        return smollm2.http.post("/tokenize", json={"messages": messages}).json()["tokens"]

    assert tokens("developer", "user") == tokens("system", "user") != tokens("user", "user")
    for roles in (
        ("developer", "user"),
        ("user", "system"),
        ("system", "system", "user"),
        ("system",),
    ):
        answer = smollm2.client.chat.completions.create(
            model=smollm2.model,
            messages=[{"role": role, "content": "Be brief."} for role in roles],  # type: ignore[misc]
            max_tokens=1,
        )
        assert answer.usage.prompt_tokens > 0


def test_case_88_bos_once(smollm2: ModelServer) -> None:
    def tokens(**body: Any) -> list[int]:
        return smollm2.http.post("/tokenize", json=body).json()["tokens"]

    bos = "<|im_start|>"
    (mark,) = tokens(prompt=bos, add_special_tokens=False)
    assert tokens(prompt=f"{bos}user").count(mark) == 1
    rendered = tokens(messages=user("x"))
    assert rendered[0] == mark and rendered[1] != mark
    answer = smollm2.client.chat.completions.create(
        model=smollm2.model, messages=user("x"), max_tokens=1
    )
    assert answer.usage.prompt_tokens == len(rendered)
    text = smollm2.http.post("/detokenize", json={"tokens": rendered}).json()["prompt"]
    assert text.startswith(bos) and complete(smollm2, text).usage.prompt_tokens == len(rendered)


def test_case_95_disconnect_frees_everything(smollm2: ModelServer) -> None:
    body = {"prompt": ALPHABET, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with smollm2.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        for _ in range(3):
            next(lines)
    deadline = time.monotonic() + 1.5  # the gauges come every 0.1 s
    while gauge(smollm2, "headrace_requests_running"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert gauge(smollm2, "headrace_requests_waiting") == 0


def gauge(server: ModelServer, name: str) -> float:
    for line in server.http.get("/metrics").text.splitlines():
        if line.startswith(name + "{"):
            return float(line.rpartition(" ")[2])
    raise AssertionError(name)


def test_case_120_cached_equals_cold(smollm2: ModelServer) -> None:
    """A salt of its own makes a request cold; the same request again finds its prefix."""
    prefix = "The quick brown fox jumps over the lazy dog. " * 12
    variants: list[dict[str, Any]] = [
        {},
        {"logprobs": 2},
        {"frequency_penalty": 0.5},
        {"extra_body": {"repetition_penalty": 1.2}},
        {"echo": True},
        {"temperature": 0.9, "seed": 5},
    ]
    for at, fields in enumerate(variants):
        prompt = f"{prefix}{at}"
        extra = fields.get("extra_body", {})
        cold = complete(
            smollm2, prompt, **{**fields, "extra_body": {**extra, "cache_salt": f"cold-{at}"}}
        )
        complete(smollm2, prefix, max_tokens=1)
        warm = complete(smollm2, prompt, **fields)
        assert warm.choices[0].text == cold.choices[0].text
        assert cold.usage.prompt_tokens_details.cached_tokens == 0
        assert warm.usage.prompt_tokens_details.cached_tokens >= 64
        if "logprobs" in fields:
            pairs = zip(
                warm.choices[0].logprobs.token_logprobs,
                cold.choices[0].logprobs.token_logprobs,
                strict=True,
            )
            assert all(abs(a - b) < 1e-3 for a, b in pairs)
