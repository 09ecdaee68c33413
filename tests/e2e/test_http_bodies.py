"""Request bodies: the cases 52, 53, 55, 57 and 87, and the rules for field names."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from headrace.engine.config.settings import EngineConfig, ServerSettings
from tests.e2e.http_helpers import USER, chat, complete, refused, still_fine
from tests.e2e.scripted import Live, live

POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b'{"messages": []} junk',
        b"\xff\xfe",
        b"[]",
        b"null",
        b'"text"',
        b"5",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"chat_template_kwargs": ' + b'{"a":' * 70 + b"1" + b"}" * 70 + b"}",
    ],
)
def test_case_52_broken_json(server: Live, path: str, body: bytes) -> None:
    refused(server.http.post(path, content=body))


def test_case_52_server_goes_on(server: Live) -> None:
    still_fine(server)


def test_the_last_of_duplicate_keys_counts(server: Live) -> None:
    body = b'{"prompt": "abc", "max_tokens": 1, "max_tokens": 2}'
    answer = server.http.post("/v1/completions", content=body).json()
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("half", [b'"\\ud83d"', b'"\\udcaa"', b'"a\\ud83db"'])
@pytest.mark.parametrize("path", POSTS)
def test_case_53_lone_surrogates(server: Live, path: str, half: bytes) -> None:
    for body in (
        b'{"messages": [{"role": "user", "content": %b}]}' % half,
        b'{"prompt": %b}' % half,
        b"{%b: 1}" % half,
        b'{"model": %b, "prompt": "x"}' % half,
    ):
        refused(server.http.post(path, content=body))
    still_fine(server)


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("stream", "true", "stream"),
        ("stream", 1, "stream"),
        ("temperature", "0.5", "temperature"),
        ("temperature", True, "temperature"),
        ("n", 1.5, "n"),
        ("n", "1", "n"),
        ("n", 1.0, "n"),
        ("messages", {}, "messages"),
        ("messages", [], "messages"),
        ("messages", "hi", "messages"),
        ("messages", [5], "messages[0]"),
        ("messages", [{"role": 5, "content": "x"}], "messages[0].role"),
        ("messages", [{"content": "x"}], "messages[0].role"),
        ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
        ("messages", [{"role": "user", "content": "x"}, {"role": ""}], "messages[1].role"),
        ("max_tokens", "5", "max_tokens"),
        ("stop", [5], "stop[0]"),
        ("logit_bias", [1], "logit_bias"),
        ("logit_bias", {"5": "x"}, "logit_bias[...]"),
        ("stream_options", 5, "stream_options"),
        ("seed", 1.5, "seed"),
        ("chat_template_kwargs", [], "chat_template_kwargs"),
        ("response_format", "json", "response_format"),
        ("response_format", {"type": "xml"}, "response_format.type"),
        ("tools", {}, "tools"),
        ("model", 5, "model"),
    ],
)
def test_case_55_wrong_types(server: Live, field: str, value: Any, param: str) -> None:
    assert refused(chat(server, **{field: value}))["param"] == param
    assert refused(chat(server, **{"stream": True, field: value}))["param"] == param


def test_a_whole_number_may_stand_for_a_float(server: Live) -> None:
    assert chat(server, temperature=1, top_p=1).status_code == 200


def test_messages_are_required(server: Live) -> None:
    refused(server.http.post("/v1/chat/completions", json={}), param="messages")
    refused(server.http.post("/v1/completions", json={}), param="prompt")
    refused(server.http.post("/tokenize", json={}), param="prompt")


def test_unknown_field_names_the_nearest(server: Live) -> None:
    error = refused(chat(server, temprature=1), param="temprature")
    assert "'temperature'" in error["message"] and error["code"] == "unknown_parameter"
    refused(chat(server, stream=True, stream_options={"x": 1}))
    refused(chat(server, **{"x" * 10_000: 1}))


@pytest.mark.parametrize(
    "field",
    ["user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"],
)
def test_harmless_fields_are_accepted(server: Live, field: str) -> None:
    assert chat(server, **{field: "x"}).status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "off"),
    [
        ("guided_json", {}, None),
        ("use_beam_search", True, False),
        ("modalities", ["audio"], ["text"]),
        ("reasoning_effort", "high", None),
        ("functions", [{}], []),
        ("function_call", "auto", "none"),
        ("length_penalty", 2.0, 1.0),
        ("truncate_prompt_tokens", 5, None),
    ],
)
def test_known_fields_are_off_or_refused(server: Live, field: str, value: Any, off: Any) -> None:
    error = refused(chat(server, **{field: value}), param=field)
    assert error["code"] == "unsupported_parameter"
    assert chat(server, **{field: off}).status_code == 200


def test_null_means_absent(server: Live) -> None:
    names = (
        "model n max_tokens max_completion_tokens temperature top_p top_k min_p seed stop stream "
        "stream_options logit_bias logprobs top_logprobs response_format tools tool_choice user "
        "presence_penalty frequency_penalty repetition_penalty priority cache_salt ignore_eos"
    )
    assert chat(server, **dict.fromkeys(names.split())).status_code == 200


def pieces(total: int) -> Iterator[bytes]:
    for _ in range(total // 65536):
        yield b"x" * 65536


@contextmanager
def healthy(server: Live) -> Iterator[None]:
    """/health answers within a second, asked every 50 ms."""
    slowest, done = [0.0], threading.Event()

    def probe() -> None:
        while not done.is_set():
            start = time.monotonic()
            assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
            slowest[0] = max(slowest[0], time.monotonic() - start)
            time.sleep(0.05)

    prober = threading.Thread(target=probe)
    prober.start()
    try:
        yield
    finally:
        done.set()
        prober.join()
    assert slowest[0] < 1.0


@pytest.mark.parametrize("chunked", [False, True])
def test_case_57_large_bodies(chunked: bool) -> None:
    """413 while the body is still being sent, and health answers meanwhile."""
    with live() as server, healthy(server):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        if chunked:
            connection.request(
                "POST",
                "/v1/completions",
                body=pieces(64 << 20),
                encode_chunked=True,
                headers={"Transfer-Encoding": "chunked"},
            )
        else:
            connection.putrequest("POST", "/v1/completions")
            connection.putheader("Content-Length", str(64 << 20))
            connection.endheaders()  # and not a byte of the body
        answer = connection.getresponse()
        assert answer.status == 413
        assert json.loads(answer.read())["error"]["code"] == "body_too_large"
        connection.close()
        still_fine(server)


CHAT_START = b'{"messages":[{"role":"user","content":"hi"}],'
MANY = 10_000_000


def numbered(entry: bytes) -> bytes:
    return b"".join(entry % i for i in range(2_000_000))


# Made when their test runs: each has some 30 MiB.
HUGE: dict[str, Callable[[], bytes]] = {
    "lists": lambda: CHAT_START + b'"metadata":{"a":[' + b"[]," * MANY + b"1]}}",
    "objects": lambda: CHAT_START + b'"metadata":{"a":[' + b"{}," * MANY + b"1]}}",
    "strings": lambda: CHAT_START + b'"stop":[' + b'"",' * MANY + b'"a"]}',
    "names": lambda: CHAT_START + numbered(b'"k%d":1,') + b'"n":1}',
    "bias": lambda: CHAT_START + b'"logit_bias":{' + numbered(b'"%d":1,') + b'"1":1}}',
    "ids": lambda: CHAT_START + b'"stop_token_ids":[' + b"1," * MANY + b"1]}",
    "deep": lambda: b'{"messages":' + b"[" * MANY + b"]" * MANY + b"}",
    "messages": lambda: b'{"messages":[' + b"{}," * MANY + b"{}]}",
    "open": lambda: b'{"messages":"' + rb"\"" * MANY,
}


@pytest.mark.parametrize("kind", HUGE)
def test_case_57_bodies_of_millions_of_parts(server: Live, kind: str) -> None:
    body = HUGE[kind]()
    with healthy(server):
        refused(server.http.post("/v1/chat/completions", content=body))
        still_fine(server)


def test_case_57_a_large_body_within_the_limit_is_parsed_fast() -> None:
    settings = ServerSettings(max_body_bytes=64 << 20)
    with live(config=EngineConfig(server=settings)) as server:
        body = b'{"prompt": [' + b",".join([b"[]"] * 400_000) + b"]}"
        refused(server.http.post("/v1/completions", content=body), param="prompt")
        text = json.dumps({"prompt": "a" * (8 << 20)}).encode()
        error = refused(server.http.post("/v1/completions", content=text), param="prompt")
        assert error["code"] == "context_length_exceeded"
        still_fine(server)


def test_marks_inside_texts_are_not_counted(server: Live) -> None:
    text = '{"a": [1, 2], "b\\": []}' * 300_000
    bias = {str(i): 1 for i in range(256)}
    error = refused(complete(server, prompt=text, logit_bias=bias), param="prompt")
    assert error["code"] == "context_length_exceeded"


def test_body_limit_is_exact() -> None:
    with live(config=EngineConfig(server=ServerSettings(max_body_bytes=200))) as server:
        body = json.dumps({"prompt": "a"}).encode()
        fits, over = body + b" " * (200 - len(body)), body + b" " * (201 - len(body))
        assert server.http.post("/v1/completions", content=fits).status_code == 200
        assert server.http.post("/v1/completions", content=iter([fits])).status_code == 200
        refused(server.http.post("/v1/completions", content=over), 413)
        refused(server.http.post("/v1/completions", content=iter([over])), 413)


@pytest.mark.parametrize(
    ("content", "same_as"),
    [
        ([{"type": "text", "text": "hi"}], "hi"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([], ""),
    ],
)
def test_case_87_content_parts(server: Live, content: Any, same_as: str) -> None:
    def tokens(content: Any) -> list[int]:
        messages = [{"role": "user", "content": content}]
        return server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]

    assert tokens(content) == tokens(same_as)


def test_case_87_an_image_is_refused(server: Live) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "what is it?"}, image]
    messages = [{"role": "user", "content": content}]
    error = refused(server.http.post("/v1/chat/completions", json={"messages": messages}))
    assert error["param"] == "messages[0].content[1]" and "image_url" in error["message"]


def test_template_refusal_is_a_400_in_its_words(server: Live) -> None:
    messages = [{"role": "refused", "content": "x"}]
    error = refused(server.http.post("/v1/chat/completions", json={"messages": messages}))
    assert "no such role" in error["message"] and error["param"] == "messages"


def test_template_fields(server: Live) -> None:
    def tokens(**fields: Any) -> Any:
        return server.http.post("/tokenize", json={"messages": USER, **fields})

    long, short = tokens().json()["count"], tokens(add_generation_prompt=False).json()["count"]
    assert long == short + len("assistant: ")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refused(tokens(**both), param="continue_final_message")
    refused(tokens(continue_final_message=True), param="continue_final_message")
    refused(tokens(chat_template="{{ messages }}"), param="chat_template")
    kwargs = {"chat_template_kwargs": {"messages": []}}
    refused(tokens(**kwargs), param="chat_template_kwargs.messages")


def test_tokenize_and_detokenize(server: Live) -> None:
    post = server.http.post
    answer = post("/tokenize", json={"prompt": "ab", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": 128,
        "tokens": [256, 97, 98],
        "token_strs": ["<s>", "a", "b"],
    }
    plain = post("/tokenize", json={"prompt": "ab", "add_special_tokens": False}).json()
    assert plain["tokens"] == [97, 98] and plain["token_strs"] is None
    assert post("/detokenize", json={"tokens": [256, 97]}).json() == {"prompt": "<s>a"}
    refused(post("/tokenize", json={"prompt": "a", "messages": USER}), param="prompt")
    refused(post("/tokenize", json={"prompt": "a", "model": "x"}), 404)


def test_completion_prompt_may_hold_any_unicode(server: Live) -> None:
    text = "\x00\u202e\U0010ffff \ufffd d\u030c"
    body = complete(server, prompt=text, echo=True, max_tokens=1).json()
    assert body["choices"][0]["text"] == text + "H"
