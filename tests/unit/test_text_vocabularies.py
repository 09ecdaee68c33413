"""Tokenizers from GGUF metadata and from tokenizer.model give the ids of the originals (case 113)."""

from __future__ import annotations

import io
import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from headrace.engine.text import sentencepiece as spm
from headrace.engine.text.fast import FastTokenizer, byte_alphabet
from headrace.engine.text.gguf_vocab import from_metadata
from headrace.engine.text.pretokenizers import pre_tokenizer
from headrace.engine.weights.source import ModelError

CORPUS = (
    ["the quick brown fox jumps over the lazy dog", "don't we'll HE'S it's", "x = 12345 + 678"] * 30
    + ["日本語 中文 한국어", "привет мир", "naïve café e\u0301", "    indented\n\n\ttabs\n"] * 20
    + ["camelCase HTTPServer", "1,000.50 $5", "مرحبا بالعالم", "👍🏽 👨‍👩‍👧 🏳️‍🌈"] * 20
)
SYLLABLES = [
    "the",
    "ing",
    "er",
    "on",
    "at",
    "en",
    "re",
    "in",
    "st",
    "nd",
    "is",
    "or",
    "ab",
    "cd",
    "THE",
    "ar",
    "al",
]
MANY_WORDS = [
    " ".join("".join(random.Random(line * 9 + w).choices(SYLLABLES, k=3)) for w in range(8))
    for line in range(200)
]
NASTY = [
    *("", " ", "a", " a", "  a", "trail   ", "a  b   c    d", "\t\ttabs\t x", "nl\n\n\n\nx\r\n y"),
    *("123456789 1 22 333", "½ ² Ⅷ", "日本語、中文。한국어", "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽", "مرحبا שלום"),
    *("def f(x):\n    return x**2  # c\n\n\tpass", "\x00\x01\x1f\x7f", "\u200b\u200d\ufeff"),
    *("e\u0301 é", "don't we'll I'M HE'S", "camelCaseWord", "\n" * 20, " " * 40 + "x", "\ufffd"),
    *("<|im_start|>user\nhi<|im_end|>", "x <|im_end|> y", "<think>hm</think>", "<|im_start|"),
]


def texts(count: int = 300) -> list[str]:
    rng = random.Random(7)
    pool = "abcd THE  \n\t12'.,-/é日本👍🏽\u0301<>|"
    return NASTY + ["".join(rng.choices(pool, k=rng.randint(1, 40))) for _ in range(count)]


def train(pre: pre_tokenizers.PreTokenizer, normalizer=None, **model) -> Tokenizer:
    """A byte-level original with two kinds of marks."""
    original = Tokenizer(models.BPE(**model))
    if normalizer is not None:
        original.normalizer = normalizer
    original.pre_tokenizer = pre
    original.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=600,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    original.train_from_iterator(CORPUS, trainer)
    original.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return original


def metadata_of(original: Tokenizer, pre: str, **extra) -> dict:
    """What a converter would write into a GGUF file."""
    import json

    state = json.loads(original.to_str())
    added = {entry["id"]: entry for entry in state["added_tokens"]}
    tokens = [original.id_to_token(i) for i in range(original.get_vocab_size())]
    types = [1 if i not in added else (3 if added[i]["special"] else 4) for i in range(len(tokens))]
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def byte_level(*cuts: pre_tokenizers.PreTokenizer, words: bool = False):
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    return pre_tokenizers.Sequence([*cuts, level])


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


ORIGINALS = {
    # as the tokenizer.json files of these families have it
    "gpt-2": (byte_level(words=True), None, {}),
    "smollm": (byte_level(pre_tokenizers.Digits(individual_digits=True), words=True), None, {}),
    "llama-bpe": (
        byte_level(
            split(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
                r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )
        ),
        None,
        {"ignore_merges": True},
    ),
    "qwen2": (
        byte_level(
            split(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
                r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )
        ),
        normalizers.NFC(),
        {},
    ),
    "deepseek-v3": (
        byte_level(
            split(r"\p{N}{1,3}"),
            split("[一-龥\u3040-ゟ゠-ヿ]+"),
            split(
                r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
                r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
                r"\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
        ),
        None,
        {},
    ),
}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_ids_and_text_equal_the_original(pre):
    original = train(*ORIGINALS[pre][:2], **ORIGINALS[pre][2])
    ours = FastTokenizer(from_metadata(metadata_of(original, pre), "m.gguf"))
    for text in texts():
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == original.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(
            ids, skip_special_tokens=False
        )
        assert ours.decode(ids) == original.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == original.get_vocab_size()
    assert ours.special_ids == {0, 1, 2}


def test_marks_are_whole_tokens():
    original = train(*ORIGINALS["gpt-2"][:2])
    ours = FastTokenizer(from_metadata(metadata_of(original, "gpt-2"), "m.gguf"))
    ids = ours.encode("<|im_start|>user<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2
    assert ours.decode(ids) == "user"
    assert ours.decode(ids, skip_special_tokens=False) == "<|im_start|>user<|im_end|>"
    think = ours.encode("<think>")
    assert len(think) == 1 and ours.decode(think) == "<think>"  # user-defined, not special
    assert ours.eos_token_ids == (2,)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_bos_and_eos_once(add_bos, add_eos):
    original = train(*ORIGINALS["gpt-2"][:2])
    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    ours = FastTokenizer(from_metadata(metadata_of(original, "gpt-2", **flags), "m.gguf"))
    body = original.encode("hello", add_special_tokens=False).ids
    expected = [1] * add_bos + body + [2] * add_eos
    assert ours.encode("hello") == expected
    assert ours.encode("hello", add_special_tokens=False) == body
    written = ours.encode("<|im_start|>hello")
    assert written[:2] == [1, body[0]]  # BOS written in the text is the only one
    assert ours.encode("") == [1] * add_bos + [2] * add_eos


def test_bos_by_default_follows_the_family():
    original = train(*ORIGINALS["gpt-2"][:2])
    for pre, expected in (("llama-bpe", True), ("tekken", True), ("qwen2", False)):
        ours = FastTokenizer(from_metadata(metadata_of(original, pre), "m.gguf"))
        assert (ours.encode("x")[0] == 1) is expected


def test_unknown_pre_tokenizer_warns_and_cuts_like_gpt2():
    original = train(*ORIGINALS["gpt-2"][:2])
    ours = FastTokenizer(from_metadata(metadata_of(original, "brand-new"), "m.gguf"))
    assert "brand-new" in ours.notes[0] and "--tokenizer" in ours.notes[0]
    for text in NASTY:
        assert ours.encode(text, False) == original.encode(text, add_special_tokens=False).ids
    assert pre_tokenizer("gpt-2")[1] == ""


@pytest.mark.parametrize(
    "name", ["tekken", "gpt-4o", "qwen35", "bailingmoe", "seed-coder", "bloom"]
)
def test_every_pattern_compiles_and_loses_nothing(name):
    original = train(*ORIGINALS["gpt-2"][:2])
    ours = FastTokenizer(from_metadata(metadata_of(original, name), "m.gguf"))
    assert not ours.notes
    for text in ("camelCase don't 1234 日本\n\n x", "  \t\n", "ÀÉ'S", "a/b\r\n"):
        assert ours.decode(ours.encode(text, False)) == text


@pytest.mark.parametrize(
    "metadata", [{}, {"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]}]
)
def test_no_or_unknown_tokenizer_says_the_way_out(metadata):
    with pytest.raises(ModelError, match="--tokenizer"):
        from_metadata(metadata, "m.gguf")


def test_lone_surrogates_do_not_raise():
    original = train(*ORIGINALS["gpt-2"][:2])
    ours = FastTokenizer(from_metadata(metadata_of(original, "gpt-2"), "m.gguf"))
    assert ours.decode(ours.encode("a\ud83db\ud83d\udc4d", False)) == "a\ufffdb👍"


def test_added_token_text_is_its_own_even_in_the_byte_alphabet():
    alphabet = byte_alphabet()
    tokens = [*alphabet, "<é>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [4],
    }
    ours = FastTokenizer(from_metadata(metadata, "m.gguf"))
    assert ours.decode([256]) == "<é>" and ours.encode("<é>") == [256]
    assert ours.token_bytes(tokens.index("Ġ")) == b" "
    assert ours.token_bytes(300) == b"" and ours.token_bytes(-1) == b""


# --- SentencePiece ---


@pytest.fixture(scope="module")
def trained():
    """tokenizer.model bytes by kind, and their SentencePiece processors."""
    sentencepiece = pytest.importorskip("sentencepiece")
    found = {}
    for kind in ("bpe", "unigram"):
        for prefix in (True, False):
            sink = io.BytesIO()
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(CORPUS + MANY_WORDS),
                model_writer=sink,
                model_type=kind,
                vocab_size=480,
                hard_vocab_limit=False,
                byte_fallback=True,
                character_coverage=0.98,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=prefix,
                split_digits=True,
                minloglevel=2,
            )
            data = sink.getvalue()
            found[kind, prefix] = (
                data,
                sentencepiece.SentencePieceProcessor(model_proto=data),
            )
    return found


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("prefix", [True, False])
def test_tokenizer_model_ids_equal_sentencepiece(trained, kind, prefix):
    data, processor = trained[kind, prefix]
    pieces = spm.read_model(data, "tokenizer.model")
    assert len(pieces.tokens) == processor.get_piece_size()
    assert (pieces.bos_id, pieces.eos_id, pieces.unk_id) == (1, 2, 0)
    assert pieces.add_space_prefix is prefix and pieces.unigram is (kind == "unigram")
    backend = spm.build(pieces)
    for text in texts():
        if "\x00" in text:
            continue  # SentencePiece ends its input there
        ours = backend.encode(text, add_special_tokens=False).ids
        theirs = processor.encode(text)
        if kind == "bpe":
            assert ours == theirs, text
        else:  # several segmentations can score the same
            score = sum(pieces.scores[i] for i in ours if pieces.types[i] == spm.NORMAL)
            best = sum(pieces.scores[i] for i in theirs if pieces.types[i] == spm.NORMAL)
            assert score == pytest.approx(best, abs=1e-3), text


def gguf_of(pieces: spm.Pieces, **extra) -> dict:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces.tokens,
        "tokenizer.ggml.scores": pieces.scores,
        "tokenizer.ggml.token_type": pieces.types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def test_gguf_llama_kind_equals_sentencepiece(trained):
    data, processor = trained["bpe", True]
    ours = FastTokenizer(from_metadata(gguf_of(spm.read_model(data, "m")), "m.gguf"))
    for text in NASTY:
        if "\x00" in text:
            continue
        assert ours.encode(text) == [1, *processor.encode(text)]
        assert ours.decode(ours.encode(text)) == text
    assert ours.strips_leading_space
    assert ours.encode("<s>hello") == [1, *processor.encode("hello")]
    assert ours.decode([processor.piece_to_id("<0xE6>")]) == "\ufffd"


def test_gguf_llama_kind_without_space_prefix(trained):
    data, processor = trained["bpe", False]
    metadata = gguf_of(spm.read_model(data, "m"), add_space_prefix=False, add_bos_token=False)
    ours = FastTokenizer(from_metadata(metadata, "m.gguf"))
    for text in ("hello", " hello", "  the  fox"):
        assert ours.encode(text) == processor.encode(text)
        assert ours.decode(ours.encode(text)) == text


def test_runs_of_spaces_stored_as_spaces_are_found():
    """Converters store Gemma's user-defined runs of spaces as spaces; they merge first and longest."""
    tokens = ["<unk>", "\u2581", "a", "  ", "   ", "\u2581a", "\n\n", "\n"]
    types = [2, 1, 1, 4, 4, 1, 4, 4]
    metadata = gguf_of(spm.Pieces(tokens, [0, -9, -8, -1000, -1000, -1, -1000, -1000], types))
    metadata.update({"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.bos_token_id": None})
    ours = FastTokenizer(from_metadata(metadata, "m.gguf"))
    assert ours.encode("a  a") == [2, 3, 2]
    assert ours.encode("   a") == [4, 2]
    assert ours.encode(" a") == [5]
    assert ours.encode("\n\na") == [6, 2]
    assert ours.decode([4, 2]) == "   a"


def test_merges_of_equal_results_prefer_the_longer_left_part():
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    merges = spm.derive_merges(tokens, [0, 0, 0, -3, -2, -1], [1] * 6)
    assert merges == [("ab", "c"), ("a", "bc"), ("b", "c"), ("a", "b")]


@pytest.mark.parametrize(
    "damage", [b"", b"not a model", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x03ab"]
)
def test_damaged_tokenizer_model_is_named(damage):
    with pytest.raises(ModelError, match=r"some/tokenizer\.model"):
        spm.read_model(damage, "some/tokenizer.model")
