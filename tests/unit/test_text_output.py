"""What a client sees of engine outputs: text, logprobs, reasons, counts (cases 13, 14, 16, 18, 49, 60)."""

from __future__ import annotations

import random

import pytest

from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.step import TokenLogprobs
from headrace.engine.ipc.messages import RequestOutput
from headrace.engine.text.fast import FastTokenizer, byte_alphabet
from headrace.engine.text.gguf_vocab import from_metadata
from headrace.engine.text.output import MIN_LOGPROB, OutputAssembler, echo_prompt
from headrace.engine.text.stops import StopStrings

EOS, MARK = 256, 257
WORDS = ["DEF", "G", "HI", "J", "ple", "as", "please"]


@pytest.fixture(scope="module")
def tokenizer() -> FastTokenizer:
    """Id b is byte b, then <eos>, <mark>, and words from 258 on."""
    alphabet = sorted(byte_alphabet().items(), key=lambda entry: entry[1])
    return FastTokenizer(
        from_metadata(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.tokens": [c for c, _ in alphabet] + ["<eos>", "<mark>", *WORDS],
                "tokenizer.ggml.token_type": [1] * 256 + [3, 3] + [1] * len(WORDS),
                "tokenizer.ggml.eos_token_id": EOS,
            },
            "m.gguf",
        )
    )


def word(text: str) -> int:
    return 258 + WORDS.index(text)


def lp(token_id: int, value: float = -0.5) -> TokenLogprobs:
    return TokenLogprobs(token_id, value, 1, [token_id, 97], [value, -2.0])


def outputs(ids, cuts=None, reason="length", stop_id=-1, logprobs=False) -> list[RequestOutput]:
    """Engine outputs with these tokens, cut into pieces of the sizes given (else one each)."""
    sizes = cuts or [1] * len(ids)
    found, at = [], 0
    for size in sizes:
        part = ids[at : at + size]
        entries = [lp(i) for i in part] if logprobs else []
        found.append(RequestOutput("r", part, entries))
        at += size
    found[-1].finish_reason = reason
    found[-1].stop_token_id = stop_id
    return found


def run(tokenizer, items, stop=(), **options):
    sampling = SamplingParams(
        min_tokens=options.pop("min_tokens", 0),
        logprobs=options.pop("logprobs", -1),
        stop_token_ids=(EOS, word("J")),
        hidden_stop_ids=options.pop("hidden", (EOS,)),
    )
    assembler = OutputAssembler(
        tokenizer, sampling, stops=StopStrings(stop) if stop else None, **options
    )
    deltas = []
    for item in items:
        deltas.append(assembler.push(item))
        if deltas[-1].finish_reason:
            break
    text = "".join(d.text for d in deltas)
    return text, deltas


def test_stop_over_tokens_shows_nothing_and_counts_its_tokens(tokenizer):
    ids = [word(w) for w in ("DEF", "G", "HI", "J", "please")]
    text, deltas = run(tokenizer, outputs(ids), ["DEFGHIJ"])
    assert text == "" and len(deltas) == 4
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason, last.completion_tokens) == ("stop", "DEFGHIJ", 4)


def test_tokens_behind_the_stop_in_one_output_are_dropped(tokenizer):
    ids = [word(w) for w in ("ple", "as", "G", "HI", "please")]
    text, deltas = run(tokenizer, outputs(ids, [5]), ["GH"])
    assert (text, deltas[-1].completion_tokens) == ("pleas", 4)
    text, deltas = run(tokenizer, outputs(ids, [5]), ["GH"], include_stop=True)
    assert (text, deltas[-1].stop_reason) == ("pleasGH", "GH")


def test_stop_and_its_absence_do_not_depend_on_chunks(tokenizer):
    rng = random.Random(2)
    for _ in range(200):
        ids = [rng.choice([97, 98, 99, 0xC3, 0xA9, word("as"), MARK]) for _ in range(15)]
        options = {"include_stop": rng.random() < 0.5, "min_tokens": rng.choice([0, 0, 4])}
        seen = set()
        for _ in range(4):
            cuts = []
            while sum(cuts) < len(ids):
                cuts.append(min(rng.randint(1, 4), len(ids) - sum(cuts)))
            text, deltas = run(
                tokenizer, outputs(ids, cuts, logprobs=True), ["abc", "asa"], logprobs=1, **options
            )
            tokens = tuple(t.token_id for d in deltas for t in d.tokens)
            last = deltas[-1]
            seen.add((text, tokens, last.finish_reason, last.stop_reason, last.completion_tokens))
        assert len(seen) == 1


def test_held_text_is_flushed_at_eos(tokenizer):
    items = outputs([word("ple"), word("as"), EOS], reason="stop", stop_id=EOS)
    text, deltas = run(tokenizer, items, ["as in"])
    assert text == "pleas" and [d.text for d in deltas] == ["ple", "", "as"]
    assert deltas[-1].completion_tokens == 3  # the end token is counted, its text is not shown
    assert deltas[-1].stop_reason is None


@pytest.mark.parametrize("stop", [(), ["zzz"], ["<mark>"], ["as<"], ["s<mark>", "<eos"]])
def test_no_control_mark_in_the_text_whatever_the_stop_list(tokenizer, stop):
    """Case 18: marks are never text, so held text that ends at one comes out whole and without it."""
    items = outputs([word("ple"), word("as"), MARK, EOS], reason="stop", stop_id=EOS)
    text, deltas = run(tokenizer, items, stop)
    assert text == "pleas" and deltas[-1].finish_reason == "stop"


def test_stop_token_of_the_user(tokenizer):
    ids = [word("DEF"), word("J")]
    shown, deltas = run(tokenizer, outputs(ids, reason="stop", stop_id=word("J")))
    assert (shown, deltas[-1].stop_reason) == ("DEFJ", word("J"))
    hidden, deltas = run(
        tokenizer,
        outputs(ids, reason="stop", stop_id=word("J"), logprobs=True),
        hidden=(EOS, word("J")),
        logprobs=0,
    )
    assert (hidden, deltas[-1].stop_reason) == ("DEF", word("J"))
    assert [t.token_id for d in deltas for t in d.tokens] == ids[:1]


def test_a_shown_end_token_still_gives_no_stop_reason(tokenizer):
    items = outputs([97, EOS], reason="stop", stop_id=EOS)
    text, deltas = run(tokenizer, items, hidden=(), skip_special_tokens=False)
    assert (text, deltas[-1].stop_reason) == ("a<eos>", None)


def test_min_tokens_shields_the_first_tokens_from_stop_strings(tokenizer):
    ids = list(b"abcabcabc")
    text, deltas = run(tokenizer, outputs(ids), ["abc"], min_tokens=3)
    assert (text, deltas[-1].completion_tokens) == ("abc", 6)
    # a match may not reach back into them
    text, deltas = run(tokenizer, outputs(ids), ["bca"], min_tokens=2)
    assert (text, deltas[-1].completion_tokens) == ("abca", 7)
    assert deltas[0].text == "a"  # nothing is withheld there


def test_cut_inside_a_character(tokenizer):
    for stop in ([], ["zz"]):
        text, deltas = run(tokenizer, outputs(list("é😀".encode())[:-1]), stop)
        assert text == "é\ufffd" and deltas[-1].finish_reason == "length"
        assert all("\ufffd" not in d.text for d in deltas[:-1])


def test_invalid_byte_does_not_end_the_answer(tokenizer):
    text, deltas = run(tokenizer, outputs([97, 0xC0, 98, EOS], reason="stop", stop_id=EOS))
    assert text == "a\ufffdb" and deltas[-1].finish_reason == "stop"


def test_joined_logprob_bytes_are_the_content(tokenizer):
    ids = [*"a😀é".encode(), word("please"), MARK, 98]
    text, deltas = run(tokenizer, outputs(ids, logprobs=True), logprobs=2)
    tokens = [t for d in deltas for t in d.tokens]
    assert b"".join(t.data for t in tokens if t.data is not None) == text.encode()
    assert [t.token_id for t in tokens] == ids
    mark = next(t for t in tokens if t.token_id == MARK)
    assert (mark.text, mark.data) == ("<mark>", None)  # not in the text
    # tokens come with the text they belong to: those of the emoji when it is complete
    assert [len(d.tokens) for d in deltas[:5]] == [1, 0, 0, 0, 4]
    assert [t.offset for t in tokens] == [0, 1, 1, 1, 1, 2, 2, 3, 9, 9]
    assert tokens[0].top[1].data == b"a" and tokens[0].top[1].logprob == -2.0


def test_logprobs_end_with_the_text_shown(tokenizer):
    ids = [word(w) for w in ("ple", "as", "G", "HI")]
    for include, expected in ((False, 2), (True, 4)):
        _, deltas = run(
            tokenizer, outputs(ids, logprobs=True), ["GH"], logprobs=0, include_stop=include
        )
        assert [t.token_id for d in deltas for t in d.tokens] == ids[:expected]
    # a token that is shown in part is kept
    _, deltas = run(tokenizer, outputs([word("please")], logprobs=True), ["ea"], logprobs=0)
    assert [t.text for t in deltas[-1].tokens] == ["please"] and deltas[-1].text == "pl"


def test_held_tokens_come_with_the_held_text(tokenizer):
    ids = [word("G"), word("HI"), 97]
    _, deltas = run(tokenizer, outputs(ids, logprobs=True), ["GHIJ"], logprobs=0)
    assert [(d.text, len(d.tokens)) for d in deltas] == [("", 0), ("", 0), ("GHIa", 3)]


def test_minus_infinity_is_clamped(tokenizer):
    item = RequestOutput("r", [97], [lp(97, float("-inf"))], finish_reason="length")
    _, deltas = run(tokenizer, [item], logprobs=1)
    token = deltas[0].tokens[0]
    assert token.logprob == MIN_LOGPROB and token.top[0].logprob == MIN_LOGPROB


@pytest.mark.parametrize("reason", ["length", "abort", "error"])
def test_other_ends_pass_through_with_what_was_held(tokenizer, reason):
    text, deltas = run(tokenizer, outputs([word("G")], reason=reason), ["GH"])
    assert (text, deltas[-1].finish_reason, deltas[-1].stop_reason) == ("G", reason, None)


def test_nothing_comes_after_the_end(tokenizer):
    assembler = OutputAssembler(tokenizer, SamplingParams(), stops=StopStrings(["a"]))
    assert assembler.push(RequestOutput("r", [97])).finish_reason == "stop"
    late = assembler.push(RequestOutput("r", [98], finish_reason="length"))
    assert (late.text, late.finish_reason, late.completion_tokens) == ("", None, 1)


def test_an_empty_last_output_ends_it(tokenizer):
    _, deltas = run(
        tokenizer, [RequestOutput("r", [97]), RequestOutput("r", finish_reason="abort")]
    )
    assert deltas[-1].finish_reason == "abort" and deltas[-1].completion_tokens == 1


def test_echo(tokenizer):
    ids = [*"é".encode(), word("please")]
    text, tokens = echo_prompt(tokenizer, ids, [lp(i) for i in ids[1:]])
    assert text == "éplease"
    assert [t.token_id for t in tokens] == ids
    assert tokens[0].logprob is None and tokens[1].logprob == -0.5
    assert [t.offset for t in tokens] == [0, 0, 1]
    assert echo_prompt(tokenizer, ids) == (text, [])


def test_offsets_continue_an_echoed_prompt(tokenizer):
    _, deltas = run(tokenizer, outputs([97, 98], logprobs=True), logprobs=0, text_offset=7)
    assert [t.offset for d in deltas for t in d.tokens] == [7, 8]
