"""The conversation behind `headrace chat`, without a terminal or a server."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.cli import chat
from headrace.cli.chat import Conversation
from headrace.cli.errors import RUNTIME, CliError


class ScriptedApi:
    """Answers each request with the next list of pieces; an exception in a list is raised there."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.closed = 0

    def stream(self, _path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.bodies.append(body)
        try:
            for piece in self.answers.pop(0):
                if isinstance(piece, BaseException):
                    raise piece
                yield {"choices": [{"delta": {"content": piece}, "finish_reason": None}]}
            yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}
            yield {"choices": [], "usage": {}}
        finally:
            self.closed += 1


def _talk(monkeypatch: pytest.MonkeyPatch, api: ScriptedApi, *lines: str) -> None:
    import contextlib

    @contextlib.contextmanager
    def connected(*_: Any) -> Iterator[Any]:
        yield api, "demo"

    monkeypatch.setattr(chat, "connect", connected)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    chat.run("demo", "", "", "", [])


def test_turns_alternate_and_are_sent_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api = ScriptedApi(["Hel", "lo"], ["Bye"])
    _talk(monkeypatch, api, "hi", "", "and now?", "/exit", "never sent")
    assert capsys.readouterr().out == "Hello\nBye\n"
    assert api.bodies[1] == {
        "model": "demo",
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "and now?"},
        ],
        **chat.START,
    }
    assert len(api.bodies) == 2


def test_ctrl_c_stops_the_answer_and_keeps_what_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api = ScriptedApi(["par", KeyboardInterrupt()], ["ok"])
    _talk(monkeypatch, api, "long", "next")
    out, err = capsys.readouterr()
    assert out == "par\nok\n" and "(stopped)" in err
    assert api.bodies[1]["messages"][1] == {"role": "assistant", "content": "par"}
    assert api.closed == 2


def test_a_refused_question_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api = ScriptedApi([CliError("the server refused: too long", RUNTIME)], ["fine"])
    _talk(monkeypatch, api, "very long", "short")
    assert "the server refused: too long" in capsys.readouterr().err
    assert api.bodies[1]["messages"] == [{"role": "user", "content": "short"}]


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    api = ScriptedApi(["a"], ["b"], ["c"])
    _talk(
        monkeypatch,
        api,
        "/help",
        "/set temperature 0.2",
        "/system Be brief.",
        "one",
        "/retry",
        "/reset",
        "/set temperature",
        "/nonsense",
        "two",
    )
    assert api.bodies[0] == {
        "model": "demo",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"},
        ],
        "temperature": 0.2,
        **chat.START,
    }
    assert api.bodies[1] == api.bodies[0]
    assert api.bodies[2]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "two"},
    ]
    assert "temperature" not in api.bodies[2]
    err = capsys.readouterr().err
    assert "/set NAME VALUE      temperature, top_p" in err
    assert "no command /nonsense" in err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["temprature", "1"], "no setting temprature; did you mean temperature?"),
        (["zzz"], "no setting zzz; there are temperature"),
        (["temperature", "9"], "at most 2, got '9'"),
        (["max-tokens", "0"], "allowed is 1 or more"),
    ],
)
def test_wrong_settings_are_explained(words: list[str], answer: str) -> None:
    with pytest.raises(ValueError) as caught:
        Conversation().set(words)
    assert answer in str(caught.value)


def test_settings_are_shown_and_taken_back() -> None:
    conversation = Conversation()
    assert conversation.set([]).startswith("nothing is set")
    assert conversation.set(["max-tokens", "8"]) == "max_tokens = 8"
    assert conversation.set([]) == "max_tokens = 8"
    assert conversation.set(["max_tokens"]) == "max_tokens is the server's default"
    assert conversation.sampling == {}
