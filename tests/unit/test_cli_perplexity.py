"""bench perplexity: windows, what they score, and the figure itself against a model whose answer is known."""

from __future__ import annotations

import asyncio
import math

import pytest

from headrace.cli.api import Address
from headrace.cli.bench import perplexity
from headrace.cli.bench.perplexity import measure, read_text, summarize, windows
from headrace.cli.errors import CliError


def scored_places(made, stride: int, context: int) -> list[int]:
    return [
        number * stride + context - back
        for number, window in enumerate(made)
        for back in range(window.scored, 0, -1)
    ]


def test_half_strides_score_every_token_after_the_first_half_once():
    made = windows(range(100), 20, 10, None)
    assert scored_places(made, 10, 20) == list(range(10, 100))
    assert made[3].tokens == list(range(30, 50))


def test_full_strides_score_second_halves_but_for_their_first_token():
    """What llama.cpp's tool scores: context - context // 2 - 1 tokens of a window."""
    made = windows(range(50), 20, 20, None)  # ten tokens do not fill a window
    assert scored_places(made, 20, 20) == [*range(11, 20), *range(31, 40)]
    assert windows(range(9), 9, 9, None)[0].scored == 4
    assert windows(range(4), 2, 2, None)[0].scored == 1  # never none


@pytest.mark.parametrize(("context", "stride"), [(7, 3), (8, 5), (9, 9), (2, 1)])
def test_no_token_counts_twice(context, stride):
    made = windows(range(60), context, stride, None)
    places = scored_places(made, stride, context)
    assert len(places) == len(set(places)) and max(places) < 60
    assert all(window.scored <= context - context // 2 for window in made)


def test_every_window_begins_with_bos():
    made = windows([1, *range(10, 29)], 5, 5, 1)
    assert [window.tokens[0] for window in made] == [1] * 4
    assert made[1].tokens[1:] == [15, 16, 17, 18]


def test_figures():
    found = summarize([math.log(0.25)] * 3 + [math.log(0.5)] * 3)
    assert found["perplexity"] == pytest.approx(math.sqrt(8))
    assert found["error"] == pytest.approx(
        math.sqrt(8) * math.log(2) * math.sqrt(0.3) / math.sqrt(6)
    )
    assert summarize([-1.0])["error"] == 0.0


class Server:
    """Knows that token t follows others with probability 1 / (t + 2)."""

    def __init__(self, bos: bool, longest: int = 64) -> None:
        self.bos, self.longest, self.prompts = bos, longest, []

    async def __call__(self, where, path, body):
        if path == "/tokenize":
            ids = [len(word) for word in body["prompt"].split()]
            special = [0] * (self.bos and body["add_special_tokens"])
            return {"tokens": special + ids, "max_model_len": self.longest}
        assert body["max_tokens"] == 1 and body["echo"] and body["logprobs"] == 0
        self.prompts.append(body["prompt"])
        values = [None, *(-math.log(t + 2) for t in body["prompt"][1:]), -99.0]
        return {"choices": [{"logprobs": {"token_logprobs": values}}]}


def run(server, text, sizes, monkeypatch):
    monkeypatch.setattr(perplexity, "call", server)
    return asyncio.run(measure(Address(), "m", text, sizes, lambda done, every: None))


@pytest.mark.parametrize("bos", [False, True])
def test_against_a_known_model(bos, monkeypatch):
    server = Server(bos)
    found = run(server, "aa " * 40, (10, 5), monkeypatch)
    assert found["perplexity"] == pytest.approx(4.0) and found["error"] == pytest.approx(0.0)
    assert found["text_tokens"] == 40 + bos
    assert found["scored_tokens"] == found["windows"] * 5
    assert all(len(prompt) == 10 for prompt in server.prompts)
    assert all((prompt[0] == 0) is bos for prompt in server.prompts)


@pytest.mark.parametrize(
    ("text", "sizes", "words"),
    [
        ("aa bb", (10, 5), "longer text"),
        ("aa " * 99, (64, 0), "--context 64 does not fit"),
        ("aa " * 99, (10, 11), "--stride 11"),
    ],
)
def test_what_cannot_be_measured(text, sizes, words, monkeypatch):
    with pytest.raises(CliError, match=words):
        run(Server(False), text, sizes, monkeypatch)


def test_files_that_are_no_text(tmp_path):
    with pytest.raises(CliError, match="cannot be read"):
        read_text(str(tmp_path / "none.txt"))
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CliError, match="no UTF-8"):
        read_text(str(tmp_path / "b.bin"))
