"""Stream shape: the cases 1, 2, 4, 8, 9, 10, 13, 35 and 63, and what a stream and its whole answer share."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tests.e2e.http_helpers import USER, chat, complete, events, refused, still_fine, stream_of
from tests.e2e.scripted import EOS, Live, Script, ScriptedEngine, live, text_tokens


def test_case_1_role_only_first_and_reason_only_last(server: Live) -> None:
    chunks = stream_of(chat(server, stream=True, max_tokens=5))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["delta"] for c in choices[1:-1]] == [{"content": char} for char in "Hello"]
    assert all(c["finish_reason"] is None for c in choices[:-1])
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "length"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


@pytest.mark.parametrize("ask", [chat, complete])
def test_case_2_finish_reason_is_always_there(server: Live, ask: Any) -> None:
    choices = [chunk["choices"][0] for chunk in stream_of(ask(server, stream=True))]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]


@pytest.mark.parametrize("ask", [chat, complete])
def test_case_4_usage_chunk(server: Live, ask: Any) -> None:
    chunks = stream_of(ask(server, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == ask(server).json()["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for options in ({"include_usage": False}, None):
        for chunk in stream_of(ask(server, stream=True, stream_options=options)):
            assert "usage" not in chunk and chunk["choices"]


def test_usage_in_every_chunk_on_request(server: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream_of(chat(server, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 6


def test_stream_options_need_a_stream(server: Live) -> None:
    refused(chat(server, stream_options={"include_usage": True}), param="stream_options")


@pytest.mark.parametrize(
    ("script", "code"),
    [(Script(error_after=3), "engine_error"), (Script(die_after=3), "engine_failed")],
)
def test_case_8_failure_after_the_first_chunk(script: Script, code: str) -> None:
    with (
        live(ScriptedEngine(script)) as server,
        socket.create_connection(("127.0.0.1", server.port), 10) as raw,
    ):
        body = b'{"messages":[{"role":"user","content":"x"}],"stream":true}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        raw.sendall(head % len(body) + body)
        received = b""
        while data := raw.recv(65536):  # ends only because the server closes the connection
            received += data
    text = received.partition(b"\r\n\r\n")[2]
    assert text.count(b'"error"') == 1 and b"[DONE]" not in text
    last = [line for line in text.split(b"\r\n") if line.startswith(b"data: ")][-1]
    (event,) = events(last.decode())
    assert event["error"]["code"] == code
    assert text.endswith(b"0\r\n\r\n")


def test_failure_before_the_first_chunk_has_a_status() -> None:
    with live(ScriptedEngine(Script(error_after=0))) as server:
        assert refused(chat(server, stream=True), 500)["message"] == "It broke."
    with live(ScriptedEngine(Script(die_after=0))) as server:
        assert refused(chat(server, stream=True), 503)["type"] == "server_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("temperature", -1),
        ("top_p", 2),
        ("max_tokens", -3),
        ("stop", ""),
        ("logit_bias", {"x": 1}),
        ("stop_token_ids", [10**9]),
        ("stream_options", {"what": True}),
        ("response_format", {"type": "json_object"}),
        ("messages", []),
        ("priority", 5),
        ("colour", "red"),
    ],
)
def test_case_9_invalid_value_with_stream(server: Live, field: str, value: Any) -> None:
    body = {"messages": USER, "stream": True, field: value}
    refused(server.http.post("/v1/chat/completions", json=body))
    still_fine(server)


def test_case_10_slow_prefill() -> None:
    with live(ScriptedEngine(Script(first_delay=1.5))) as server:
        text = [
            c["choices"][0]["delta"].get("content", "")
            for c in stream_of(chat(server, stream=True))
        ]
        assert "".join(text) == "Hello"


def test_case_13_stop_over_several_tokens_is_withheld() -> None:
    script = Script([262, 263, 264, 265, *text_tokens("!"), EOS])  # DEF G HI J !
    with live(ScriptedEngine(script)) as server:
        chunks = stream_of(complete(server, stream=True, stop="DEFGHIJ"))
        (only,) = [chunk["choices"][0] for chunk in chunks]
        assert only["text"] == "" and only["finish_reason"] == "stop"
        whole = complete(server, stop=["DEFGHIJ"])
        assert whole.json()["choices"][0]["text"] == ""
        assert whole.json()["usage"]["completion_tokens"] == 4
        assert len(server.engine.aborted) == 2  # what would still have been generated


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 1}, {"n": 2}, {"stop": "lo"}, {"max_tokens": 3}]
)
def test_case_35_stream_with_echo_equals_whole(server: Live, fields: dict[str, Any]) -> None:
    whole = complete(server, echo=True, **fields).json()["choices"]
    joined: dict[int, dict[str, Any]] = {}
    for chunk in stream_of(complete(server, echo=True, stream=True, **fields)):
        (choice,) = chunk["choices"]
        seen = joined.setdefault(choice["index"], {"text": "", "logprobs": None})
        seen["text"] += choice["text"]
        seen["finish_reason"] = choice["finish_reason"]
        if choice["logprobs"]:
            seen["logprobs"] = seen["logprobs"] or {name: [] for name in choice["logprobs"]}
            for name, values in choice["logprobs"].items():
                seen["logprobs"][name] += values
    assert [{"index": at, **seen} for at, seen in sorted(joined.items())] == [
        {name: choice[name] for name in ("index", "text", "logprobs", "finish_reason")}
        for choice in whole
    ]
    assert whole[0]["text"].startswith("abcHel")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["none", None])
def test_case_63_no_tool_calls_key_without_calls(
    server: Live, stream: bool, choice: str | None
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}] if choice else None
    response = chat(server, stream=stream, tools=tools, tool_choice=choice)
    chunks = stream_of(response) if stream else [response.json()]
    for chunk in chunks:
        shown = chunk["choices"][0]["delta" if stream else "message"]
        assert "tool_calls" not in shown
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}, None]
)
def test_tools_that_could_be_called_are_refused(server: Live, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    error = refused(chat(server, tools=tools, tool_choice=choice), param="tools")
    assert error["code"] == "unsupported_parameter"


def test_choices_of_one_request() -> None:
    """n choices are n sequences with seeds of their own; usage counts the prompt once."""
    with live(ScriptedEngine()) as server:
        body = chat(server, n=3, seed=7).json()
        assert [c["index"] for c in body["choices"]] == [0, 1, 2]
        assert {c["message"]["content"] for c in body["choices"]} == {"Hello"}
        assert body["usage"]["completion_tokens"] == 18
        assert body["usage"]["prompt_tokens"] == chat(server).json()["usage"]["prompt_tokens"]
        assert [s.sampling.seed for s in server.engine.submits[:3]] == [7, 8, 9]
        chunks = stream_of(chat(server, n=3, stream=True))
        roles = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
        assert sorted(roles) == [0, 1, 2]


def test_whole_answer_has_openais_shape(server: Live) -> None:
    body = chat(server).json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["system_fingerprint"].startswith("fp_")
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hello",
        "refusal": None,
    }
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert complete(server).json()["object"] == "text_completion"
