"""How byte-level vocabularies cut text into words before merging, by the name in GGUF files (tokenizer.ggml.pre).

A GGUF file carries no tokenizer.json; the name stands for the normalizer and the splits of the original one. The
patterns are those of the original tokenizer.json files (Oniguruma syntax, as the `tokenizers` package reads them).
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(ending: str) -> str:
    """Words cut where lower case turns to upper case ("camelCase" is two)."""
    head = r"[^\r\n\p{L}\p{N}]?"
    return f"{head}{_UPPER}*{_LOWER}+{ending}|{head}{_UPPER}+{_LOWER}*{ending}"


_DIGIT = r"\p{N}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SYMBOLS}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_TEKKEN = rf"{_cased_words('')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
_GPT4O = (
    rf"{_cased_words(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
)
_CJK = "[一-龥\u0800-一가-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`splits` are cut out one after the other; `words` adds GPT-2's own pattern behind them."""

    splits: tuple[str, ...] = ()
    words: bool = False
    nfc: bool = False  # the original normalizes to Unicode NFC first
    ignore_merges: bool = False  # a word that is a token stays whole whatever the merges say
    add_bos: bool = False  # where the file does not say

    def build(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.splits]
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.words)
        return pre_tokenizers.Sequence([*cuts, level])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_GPT2 = PreTokenizer(words=True)
_FAMILIES: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "default gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4 "
        "modern-bert jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe",
        _GPT2,
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b",
        PreTokenizer((_DIGIT,), words=True),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("qwen2 kormo megrez f2llmv2", PreTokenizer((_QWEN2,), nfc=True)),
    ("qwen35", PreTokenizer((_QWEN35,), nfc=True)),
    ("deepseek-r1-qwen stablelm2 hunyuan solar-open grok-2", PreTokenizer((_QWEN2,))),
    ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DEEPSEEK_V3)),
    ("deepseek-coder", PreTokenizer(_DEEPSEEK_CODER)),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("seed-coder", PreTokenizer((_SEED,))),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, _DIGIT))),
)
_BY_NAME = {name: kind for names, kind in _FAMILIES for name in names.split()}


def pre_tokenizer(name: str) -> tuple[PreTokenizer, str]:
    """The pre-tokenizer of that name; for an unknown one GPT-2's, and a sentence that warns."""
    known = _BY_NAME.get(name)
    if known is not None:
        return known, ""
    return _GPT2, (
        f"the file's pre-tokenizer {name!r} is unknown, so text is cut as GPT-2 does and answers may suffer; "
        "pass --tokenizer with the original model's repository or folder"
    )
