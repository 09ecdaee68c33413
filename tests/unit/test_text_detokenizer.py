"""Incremental detokenizing: deltas joined are the text of the whole (cases 59 and 60)."""

from __future__ import annotations

import random

import pytest

from headrace.engine.text.detokenizer import Detokenizer
from headrace.engine.text.fast import FastTokenizer, byte_alphabet
from headrace.engine.text.gguf_vocab import from_metadata

ALPHABET = sorted(byte_alphabet().items(), key=lambda entry: entry[1])


def byte_level() -> FastTokenizer:
    """Id b is byte b; then a few longer tokens and the mark <end> as the last."""
    words = ["Ġthe", "ing", "<end>"]
    return FastTokenizer(
        from_metadata(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.tokens": [char for char, _ in ALPHABET] + words,
                "tokenizer.ggml.token_type": [1] * 258 + [3],
            },
            "m.gguf",
        )
    )


def byte_fallback(prefix: bool = True) -> FastTokenizer:
    """Ids 0..255 are byte tokens; then words with the space mark and the mark </s> as the last."""
    words = ["\u2581the", "\u2581", "日", "a", "</s>"]
    return FastTokenizer(
        from_metadata(
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": [f"<0x{b:02X}>" for b in range(256)] + words,
                "tokenizer.ggml.scores": [0.0] * 261,
                "tokenizer.ggml.token_type": [6] * 256 + [1] * 4 + [3],
                "tokenizer.ggml.add_space_prefix": prefix,
                "tokenizer.ggml.add_bos_token": False,
            },
            "m.gguf",
        )
    )


TOKENIZERS = {"byte-level": byte_level(), "byte-fallback": byte_fallback()}
SAMPLES = [
    "ď",
    "😀",
    "👨‍👩‍👧‍👦",
    "日本語テキスト",
    "🏳️‍🌈x",
    "مرحبا",
    "e\u0301",
    "\x00\x7f\n\t",
    "𝕬 b",
]


def in_chunks(tokenizer, ids, rng, **options) -> str:
    detokenizer = Detokenizer(tokenizer, **options)
    parts, at = [], 0
    while at < len(ids):
        size = rng.choice([1, 1, 1, 2, 3, 7])
        if size == 1:
            parts.append(detokenizer.push_one(ids[at]))
        else:
            parts.append(detokenizer.push(ids[at : at + size]))
        at += size
    return "".join(parts) + detokenizer.flush()


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("sample", SAMPLES)
def test_no_replacement_character_inside_a_character(kind, sample):
    tokenizer = TOKENIZERS[kind]
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for byte in sample.encode():
        shown += detokenizer.push_one(byte)
        assert sample.startswith(shown)  # nothing false is ever shown
    assert shown + detokenizer.flush() == sample == tokenizer.decode(sample.encode())


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_joined_deltas_do_not_depend_on_the_cuts(kind):
    tokenizer, rng = TOKENIZERS[kind], random.Random(3)
    for _ in range(400):
        text = "".join(rng.choices("ab é日😀\n\u200d", k=rng.randint(0, 12))).encode()
        ids = list(text)
        for _ in range(rng.randint(0, 3)):  # ill-formed bytes, words and marks in between
            ids.insert(rng.randint(0, len(ids)), rng.randrange(tokenizer.vocab_size))
        whole = b"".join(
            tokenizer.token_bytes(i) for i in ids if i not in tokenizer.special_ids
        ).decode("utf-8", "replace")
        assert in_chunks(tokenizer, ids, rng) == whole
        decoded = tokenizer.decode(ids)
        assert in_chunks(tokenizer, ids, rng, start_of_text=True) == decoded
        shown = in_chunks(tokenizer, ids, rng, skip_special_tokens=False, start_of_text=True)
        assert shown == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xf0\x9f\x98", "\ufffd"),  # cut by max_tokens
        (b"a\xc0b", "a\ufffdb"),  # never a first byte
        (b"\xe6\x97a", "\ufffda"),  # broken off: one for the ill-formed part
        (b"\x80\x80", "\ufffd\ufffd"),
        (b"\xf0\x9f\x98\xf0\x9f\x98\x80", "\ufffd😀"),
        (b"\xed\xa0\xbd", "\ufffd\ufffd\ufffd"),  # a surrogate
    ],
)
def test_ill_formed_parts(kind, data, text):
    tokenizer = TOKENIZERS[kind]
    for seed in range(5):
        assert in_chunks(tokenizer, list(data), random.Random(seed)) == text
    assert tokenizer.decode(list(data)) == text


def test_special_tokens_are_skipped_or_shown():
    tokenizer = TOKENIZERS["byte-level"]
    ids = [97, 258, 98]
    assert in_chunks(tokenizer, ids, random.Random(0)) == "ab"
    assert in_chunks(tokenizer, ids, random.Random(0), skip_special_tokens=False) == "a<end>b"


def test_leading_space_of_a_continuation_is_kept_and_of_a_text_dropped():
    tokenizer = byte_fallback()
    the, space, a = 256, 257, 259
    assert in_chunks(tokenizer, [the, the], random.Random(0)) == " the the"
    assert in_chunks(tokenizer, [the, the], random.Random(0), start_of_text=True) == "the the"
    assert tokenizer.decode([the, the]) == "the the"
    assert tokenizer.decode([space, the]) == " the"  # one space only
    assert tokenizer.decode([a, the]) == "a the"
    # prompt and continuation together are the whole
    prompt, output = [the, a], [the, space, a]
    joined = tokenizer.decode(prompt) + in_chunks(tokenizer, output, random.Random(1))
    assert joined == tokenizer.decode(prompt + output)
    assert byte_fallback(prefix=False).decode([the]) == " the"


def test_ids_without_a_token_stand_for_nothing():
    tokenizer = TOKENIZERS["byte-level"]
    assert in_chunks(tokenizer, [97, 10**6, 98], random.Random(0)) == "ab"


def test_token_text_of_part_of_a_character():
    tokenizer = TOKENIZERS["byte-fallback"]
    assert tokenizer.token_bytes(0xF0) == b"\xf0"
    assert tokenizer.token_text(0xF0) == "\ufffd"
    assert tokenizer.token_text(256) == " the"
