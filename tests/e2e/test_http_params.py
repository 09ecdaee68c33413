"""Validation and mapping of fields: the cases 20, 21, 23, 24, 27, 28, 29, 31, 33, 39, 41, 44, 46, 48, 49, 58."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from headrace.engine.config.settings import EngineConfig, ServerSettings
from headrace.engine.core.sampling import SamplingParams
from tests.e2e.http_helpers import chat, complete, refused, still_fine, stream_of
from tests.e2e.scripted import (
    BOS,
    EOS,
    VOCAB,
    ByteTokenizer,
    Live,
    Script,
    ScriptedEngine,
    live,
    text_tokens,
)


def sampled(server: Live, ask: Any = chat, **fields: Any) -> SamplingParams:
    """The parameters that reach the engine."""
    response = ask(server, **fields)
    assert response.status_code == 200, response.text
    return server.engine.submits[-1].sampling


def prompt_ids(server: Live, at: int = -1) -> list[int]:
    return np.frombuffer(server.engine.submits[at].token_ids, "<i4").tolist()


@pytest.mark.parametrize("stop", [None, []])
def test_case_20_no_stop(server: Live, stop: Any) -> None:
    assert chat(server, stop=stop).json()["choices"][0]["message"]["content"] == "Hello"


@pytest.mark.parametrize("stop", ["", [""], [None], ["a", ""], 5, {}])
def test_case_20_empty_stop_values(server: Live, stop: Any) -> None:
    refused(chat(server, stop=stop))
    refused(chat(server, stop_token_ids=[None]))
    still_fine(server)


def test_case_21_max_tokens(server: Live) -> None:
    assert sampled(server, complete, max_tokens=None).max_tokens == 16
    assert sampled(server, complete).max_tokens == 16
    nothing = complete(server, max_tokens=0).json()
    assert nothing["choices"][0]["text"] == ""
    for logprobs in (None, 1):
        echoed = complete(server, max_tokens=0, echo=True, logprobs=logprobs).json()
        assert echoed["choices"][0]["text"] == "abc"
        assert echoed["choices"][0]["finish_reason"] == "length"
        assert echoed["usage"]["completion_tokens"] == 0
        if logprobs:
            assert echoed["choices"][0]["logprobs"]["tokens"] == ["<s>", "a", "b", "c"]
    assert sampled(server, complete, max_tokens=10**6).max_tokens == 128 - 4
    refused(chat(server, max_tokens=0), param="max_tokens")


def test_case_23_chat_without_a_limit() -> None:
    endless = ScriptedEngine(Script(text_tokens("ab") * 200), context=128)
    with live(endless) as server:
        body = chat(server).json()
        used = body["usage"]
        assert body["choices"][0]["finish_reason"] == "length"
        assert used["total_tokens"] == 128


def test_max_completion_tokens(server: Live) -> None:
    assert sampled(server, max_completion_tokens=3).max_tokens == 3
    assert sampled(server, max_completion_tokens=3, max_tokens=3).max_tokens == 3
    refused(chat(server, max_completion_tokens=3, max_tokens=4), param="max_tokens")


@pytest.mark.parametrize("ids", [[10**9], [-1], [VOCAB], [1.5], [True], [2**70]])
def test_case_24_stop_token_ids_out_of_range(server: Live, ids: list[Any]) -> None:
    refused(chat(server, min_tokens=1, stop_token_ids=ids), param="stop_token_ids[0]")
    still_fine(server)


def test_stop_token_ids_and_end_of_text(server: Live) -> None:
    both = sampled(server, stop_token_ids=[108])
    assert both.stop_token_ids == (EOS, 108) and both.hidden_stop_ids == (EOS, 108)
    assert sampled(server, ignore_eos=True).stop_token_ids == ()
    shown = sampled(server, include_stop_str_in_output=True, stop_token_ids=[108])
    assert shown.hidden_stop_ids == ()
    assert complete(server, stop_token_ids=[108]).json()["choices"][0]["text"] == "He"
    text = complete(server, stop="l", include_stop_str_in_output=True).json()["choices"][0]["text"]
    assert text == "Hel"


@pytest.mark.parametrize("prompt", ["", [""], [], [[]]])
def test_case_27_empty_prompt(server: Live, prompt: Any) -> None:
    assert complete(server, prompt=prompt).status_code == 200
    assert prompt_ids(server) == [BOS]
    with live(tokenizer=ByteTokenizer(bos=False)) as bare:
        refused(complete(bare, prompt=prompt), param="prompt")
        still_fine(bare)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31, 2**63 - 1, 2**64, 1.5, True, None, "a", [1]])
def test_case_28_token_ids_out_of_range(
    server: Live, token: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    refused(complete(server, prompt=[1, token]), param="prompt[1]")
    refused(complete(server, prompt=[[1], [2, token]]), param="prompt[1][1]")
    refused(server.http.post("/detokenize", json={"tokens": [token]}), param="tokens[0]")
    still_fine(server)


def test_case_29_token_ids_and_lists(server: Live) -> None:
    def texts(prompt: Any, **fields: Any) -> list[tuple[int, str]]:
        body = complete(server, prompt=prompt, echo=True, max_tokens=2, **fields).json()
        return [(c["index"], c["text"]) for c in body["choices"]]

    assert texts([97, 98]) == [(0, "abHe")]
    assert texts([[97, 98], [99]]) == [(0, "abHe"), (1, "cHe")]
    assert texts(["a"]) == [(0, "aHe")]
    assert texts(["a", "b"], n=2) == [(0, "aHe"), (1, "aHe"), (2, "bHe"), (3, "bHe")]
    usage = complete(server, prompt=["a", "bc"], n=2, max_tokens=2).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2 + 3, 8)
    refused(complete(server, prompt=["a", [1]]), param="prompt[1]")
    for wrong in ({}, 5, True, None):
        refused(complete(server, prompt=wrong), param="prompt")


@pytest.mark.parametrize("stream", [False, True])
def test_case_31_prompt_longer_than_the_context(server: Live, stream: bool) -> None:
    fits = complete(server, prompt=[97] * 127, max_tokens=50)
    assert fits.json()["choices"][0]["finish_reason"] == "length"
    assert fits.json()["usage"]["completion_tokens"] == 1
    for length in (128, 129, 3 * 128):
        error = refused(complete(server, prompt=[97] * length, stream=stream), param="prompt")
        assert error["code"] == "context_length_exceeded"
        assert "128" in error["message"] and str(length) in error["message"]
    messages = [{"role": "user", "content": "a" * 400}]
    error = refused(
        server.http.post("/v1/chat/completions", json={"messages": messages, "stream": stream}),
        param="messages",
    )
    assert error["code"] == "context_length_exceeded" and "418" in error["message"]
    messages[0]["content"] = "a" * 200_000  # refused without tokenizing
    error = refused(server.http.post("/v1/chat/completions", json={"messages": messages}))
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_case_33_echo_with_logprobs(server: Live, stream: bool) -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1}
    if stream:
        parts = [
            c["choices"][0]["logprobs"] for c in stream_of(complete(server, stream=True, **fields))
        ]
        logprobs = {k: [v for p in parts if p for v in p[k]] for k in ("tokens", "text_offset")}
        logprobs["token_logprobs"] = [v for p in parts if p for v in p["token_logprobs"]]
    else:
        logprobs = complete(server, **fields).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["<s>", "a", "b", "c", "H"]
    assert logprobs["token_logprobs"] == [None, -1.0, -1.0, -1.0, -0.5]
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3]


def test_echo_with_logprobs_of_a_single_token(server: Live) -> None:
    body = complete(server, prompt=[97], echo=True, logprobs=0, max_tokens=1).json()
    assert body["choices"][0]["logprobs"]["tokens"] == ["a", "H"]
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-6, 1e-5, 1e-4])
def test_case_39_tiny_temperatures_are_greedy(server: Live, temperature: float) -> None:
    assert sampled(server, temperature=temperature).temperature == 0.0


def test_case_39_others_are_kept(server: Live) -> None:
    assert sampled(server, temperature=0.5).temperature == 0.5
    assert sampled(server).temperature == 1.0


@pytest.mark.parametrize(
    ("field", "value", "sent"),
    [
        ("top_k", -1, 0),
        ("top_k", 0, 0),
        ("top_k", 1, 1),
        ("top_k", VOCAB, 0),
        ("top_k", 10**9, 0),
        ("top_p", 0, 1e-9),
        ("top_p", 1e-9, 1e-9),
        ("top_p", 1, 1.0),
        ("min_p", 0, 0.0),
        ("min_p", 1, 1.0),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 2, 2.0),
        ("repetition_penalty", 1.3, 1.3),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("logit_bias", {}, {}),
        ("logit_bias", None, {}),
        ("logit_bias", {"257": -100}, {257: -100.0}),
        ("logit_bias", {"260": -100}, {260: -100.0}),
    ],
)
def test_case_41_44_values_that_are_taken(server: Live, field: str, value: Any, sent: Any) -> None:
    assert getattr(sampled(server, **{field: value}), field) == sent


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -2),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("min_p", -1),
        ("min_p", 2),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("temperature", -0.1),
        ("temperature", 1000),
        ("seed", -1),
        ("seed", 2**64),
        ("min_tokens", -1),
        ("n", 0),
        ("n", -1),
        ("n", 10**6),
        ("max_tokens", 2**31),
        ("max_tokens", -1),
        ("logit_bias", {"999999999": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"5": 200}),
        ("stop", ["x"] * 10**5),
        ("stop", ["x" * 5000]),
        ("stop_token_ids", list(range(200))),
        ("logit_bias", {str(i): 1 for i in range(2000)}),
    ],
)
def test_case_41_44_58_values_that_are_refused(server: Live, field: str, value: Any) -> None:
    error = refused(chat(server, **{field: value}))
    assert error["param"].startswith(field)
    still_fine(server)


def test_case_44_not_a_number(server: Live) -> None:
    assert "logit_bias" in refused(chat(server, logit_bias={"5": "NaN"}))["param"]


def test_seed_is_drawn_when_absent(server: Live) -> None:
    assert sampled(server, seed=5).seed == 5
    assert len({sampled(server).seed for _ in range(4)}) == 4
    chat(server, n=3)
    assert len({submit.sampling.seed for submit in server.engine.submits[-3:]}) == 3


def test_a_servers_seed_gives_every_start_the_same_seeds() -> None:
    config = EngineConfig(server=ServerSettings(seed=9))
    starts = []
    for _ in range(2):
        with live(config=config) as server:
            chat(server, n=2)
            chat(server, seed=5)
            chat(server)
            starts.append([submit.sampling.seed for submit in server.engine.submits])
    assert starts[0] == starts[1]
    assert len(set(starts[0])) == 4 and starts[0][2] == 5


def test_case_46_chat_forms(server: Live) -> None:
    for fields in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
        entries = chat(server, **fields).json()["choices"][0]["logprobs"]["content"]
        assert [e["token"] for e in entries] == list("Hello")
        assert entries[0] == {"token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": []}
    refused(chat(server, top_logprobs=3, logprobs=False), param="top_logprobs")
    refused(chat(server, top_logprobs=3), param="top_logprobs")
    refused(chat(server, top_logprobs=21, logprobs=True), param="top_logprobs")
    assert chat(server, logprobs=False).json()["choices"][0]["logprobs"] is None


def test_case_46_completion_forms(server: Live) -> None:
    logprobs = complete(server, logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("Hello")
    assert logprobs["top_logprobs"][0] == {"H": -0.5}
    assert complete(server).json()["choices"][0]["logprobs"] is None
    refused(complete(server, logprobs=True), param="logprobs")
    refused(complete(server, logprobs=-1), param="logprobs")
    refused(complete(server, logprobs=21), param="logprobs")


def test_case_48_minus_infinity_is_written_as_a_number() -> None:
    script = Script(top=[(72, -0.5), (65, -math.inf), (66, -math.inf)])
    with live(ScriptedEngine(script)) as server:
        entry = chat(server, logprobs=True, top_logprobs=3).json()["choices"][0]["logprobs"][
            "content"
        ][0]
        assert [t["logprob"] for t in entry["top_logprobs"]] == [-0.5, -9999.0, -9999.0]
        top = complete(server, logprobs=3).json()["choices"][0]["logprobs"]["top_logprobs"][0]
        assert top == {"H": -0.5, "A": -9999.0, "B": -9999.0}


@pytest.mark.parametrize("stream", [False, True])
def test_case_49_bytes_of_partial_characters(stream: bool) -> None:
    with live(ScriptedEngine(Script([*text_tokens("a\U0001f600"), EOS]))) as server:
        response = chat(server, logprobs=True, stream=stream)
        chunks = stream_of(response) if stream else [response.json()]
        choices = [chunk["choices"][0] for chunk in chunks]
        shown = [c["delta" if stream else "message"].get("content", "") for c in choices]
        entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
        assert "".join(shown) == "a\U0001f600"
        assert bytes(b for e in entries for b in e["bytes"]).decode() == "a\U0001f600"


def test_best_of_and_suffix(server: Live) -> None:
    assert complete(server, best_of=2, n=2).status_code == 200
    refused(complete(server, best_of=2), param="best_of")
    assert chat(server, best_of=2, n=2).status_code == 200
    refused(chat(server, best_of=2), param="best_of")
    refused(complete(server, suffix="x"), param="suffix")
    assert complete(server, suffix=None).status_code == 200


def test_min_tokens(server: Live) -> None:
    assert sampled(server, min_tokens=3).min_tokens == 3
    refused(chat(server, min_tokens=5, max_tokens=4), param="min_tokens")
    assert sampled(server, min_tokens=1000).min_tokens <= 128
