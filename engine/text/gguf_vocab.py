"""The tokenizer of a GGUF file, from its metadata (keys tokenizer.ggml.*).

The file says which kind of vocabulary it holds and lists tokens, scores or merges, and token types; what a
tokenizer.json would say beyond that is supplied by kind: `pretokenizers` for byte-level BPE, `sentencepiece` for the
rest. Ids equal those of the original tokenizer. What the file cannot say is lost: marks that swallow the spaces
around them in the original (lstrip, rstrip) do not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from headrace.engine.text import sentencepiece as spm
from headrace.engine.text.fast import TokenizerParts
from headrace.engine.text.pretokenizers import pre_tokenizer
from headrace.engine.weights.source import ModelError

_KEY = "tokenizer.ggml."
# names of templates' variables by the metadata key of their id
_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


def from_metadata(metadata: Mapping[str, Any], path: str) -> TokenizerParts:
    """Builds the tokenizer of the file at `path`. Raises ModelError when it has none or one of an unknown kind."""
    kind = metadata.get(_KEY + "model")
    if not kind or _KEY + "tokens" not in metadata:
        raise ModelError(
            f"{path} holds no tokenizer; pass --tokenizer with the original model's repository or folder"
        )
    tokens: list[str] = metadata[_KEY + "tokens"]
    types = _types(metadata, tokens)
    if kind == "gpt2":
        backend, add_bos, notes = _byte_level(metadata, tokens, types)
        add_eos = False
    elif kind in ("llama", "gemma4", "t5"):
        backend = spm.build(_pieces(metadata, kind, tokens, types))
        add_bos, add_eos, notes = kind == "llama", kind == "t5", []
    else:
        raise ModelError(
            f"{path} has a tokenizer of the kind {kind!r}, which is not supported; "
            "pass --tokenizer with the original model's repository or folder"
        )
    bos, eos = _id(metadata, "bos_token_id", tokens), _id(metadata, "eos_token_id", tokens)
    # gemma4's files say add_bos_token, but the original leaves BOS to the chat template
    if kind != "gemma4":
        add_bos = bool(metadata.get(_KEY + "add_bos_token", add_bos))
    add_eos = bool(metadata.get(_KEY + "add_eos_token", add_eos))
    ends = [eos, _id(metadata, "eot_token_id", tokens), _id(metadata, "eom_token_id", tokens)]
    names = {name: _id(metadata, key, tokens) for name, key in _NAMES.items()}
    return TokenizerParts(
        backend,
        len(tokens),
        [bos] if add_bos and bos is not None else [],
        [eos] if add_eos and eos is not None else [],
        bos,
        [i for i in ends if i is not None],
        _templates(metadata),
        {name: tokens[i] for name, i in names.items() if i is not None},
        notes,
    )


def _id(metadata: Mapping[str, Any], key: str, tokens: Sequence[str]) -> int | None:
    value = metadata.get(_KEY + key)
    return value if isinstance(value, int) and 0 <= value < len(tokens) else None


def _types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    if _KEY + "token_type" in metadata:
        types: list[int] = metadata[_KEY + "token_type"]
        if len(types) == len(tokens):
            return types
    types = [spm.NORMAL] * len(tokens)
    for key in ("bos_token_id", "eos_token_id"):
        marked = _id(metadata, key, tokens)
        if marked is not None:
            types[marked] = spm.CONTROL
    return types


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[Tokenizer, bool, list[str]]:
    """(backend, whether BOS is added where the file does not say, notes)."""
    pre, warning = pre_tokenizer(metadata.get(_KEY + "pre", "default"))
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)},
        _merges(metadata),
        ignore_merges=pre.ignore_merges,
    )
    backend = Tokenizer(model)
    normalizer = pre.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (spm.CONTROL, spm.UNKNOWN) and token:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == spm.USER_DEFINED and token:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
    return backend, pre.add_bos, [warning] if warning else []


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for line in metadata.get(_KEY + "merges", ()):
        cut = line.find(" ", 1)  # a part may begin with a space
        if cut > 0:
            merges.append((line[:cut], line[cut + 1 :]))
    return merges


def _pieces(
    metadata: Mapping[str, Any], kind: str, tokens: list[str], types: list[int]
) -> spm.Pieces:
    scores = metadata[_KEY + "scores"] if _KEY + "scores" in metadata else [0.0] * len(tokens)
    charsmap = metadata.get(_KEY + "precompiled_charsmap", ())
    unk = _id(metadata, "unknown_token_id", tokens)
    if unk is None:
        unk = types.index(spm.UNKNOWN) if spm.UNKNOWN in types else -1
    return spm.Pieces(
        tokens,
        scores,
        types,
        unigram=kind == "t5",
        merges=_merges(metadata) if _KEY + "merges" in metadata else None,
        unk_id=unk,
        add_space_prefix=bool(metadata.get(_KEY + "add_space_prefix", kind != "gemma4")),
        remove_extra_spaces=bool(metadata.get(_KEY + "remove_extra_whitespaces", False)),
        charsmap=bytes(b & 0xFF for b in charsmap),
    )


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The default template and named ones (tokenizer.chat_template.NAME)."""
    prefix = "tokenizer.chat_template"
    named = [key for key in metadata if key.startswith(prefix + ".")]
    found = {key[len(prefix) + 1 :]: metadata[key] for key in named}
    if isinstance(metadata.get(prefix), str):
        found["default"] = metadata[prefix]
    return found
