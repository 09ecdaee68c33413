"""SentencePiece vocabularies: the reader of tokenizer.model, and their form for the `tokenizers` package.

The GGUF kinds "llama", "gemma4" and "t5" are the same vocabularies in another container and are built here too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from headrace.engine.weights.source import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_MARK = "\u2581"


@dataclass(slots=True)
class Pieces:
    """A SentencePiece vocabulary. Lists run over ids; `types` are SentencePiece's numbers (NORMAL, ...)."""

    tokens: list[str]
    scores: list[float]
    types: list[int]
    unigram: bool = False
    merges: list[tuple[str, str]] | None = None  # None: recovered from the scores
    unk_id: int = 0
    bos_id: int = -1  # -1: none
    eos_id: int = -1
    add_space_prefix: bool = True
    remove_extra_spaces: bool = False
    charsmap: bytes = b""
    special: frozenset[str] = field(default=frozenset())  # user-defined pieces that are marks


def derive_merges(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Merges in the order in which SentencePiece's BPE applies them, from the scores of their results.

    User-defined pieces come first: SentencePiece keeps them whole before it merges anything. Equal scores are
    ordered by the length of the left part, then of the right one, longest first (as Hugging Face's converter does).
    """
    vocab = set(tokens)
    whole = [i for i, kind in enumerate(types) if kind == USER_DEFINED]
    first = _splits((tokens[i] for i in whole), vocab)
    first.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
    rest = [i for i, kind in enumerate(types) if kind != USER_DEFINED]
    rest.sort(key=lambda i: -scores[i])
    return first + _splits((tokens[i] for i in rest), vocab)


def _splits(tokens: Iterable[str], vocab: set[str]) -> list[tuple[str, str]]:
    """Every way to write each token as two tokens. This is half of the start with a vocabulary of 262k."""
    return [
        (left, right)
        for token in tokens
        for cut in range(len(token) - 1, 0, -1)
        if (right := token[cut:]) in vocab and (left := token[:cut]) in vocab
    ]


def build(pieces: Pieces) -> Tokenizer:
    """The backend tokenizer; BOS and EOS are the caller's business."""
    # Some converters store runs of spaces as spaces; the vocabulary knows them by the mark.
    tokens = [_MARK * len(t) if t and not t.strip(" ") else t for t in pieces.tokens]
    byte_fallback = BYTE in pieces.types
    if pieces.unigram:
        vocab = list(zip(tokens, pieces.scores, strict=True))
        unk = pieces.unk_id if 0 <= pieces.unk_id < len(tokens) else None
        backend = Tokenizer(models.Unigram(vocab, unk, byte_fallback))
    else:
        merges = pieces.merges
        if merges is None:
            merges = derive_merges(tokens, pieces.scores, pieces.types)
        backend = Tokenizer(
            models.BPE(
                {token: i for i, token in enumerate(tokens)},
                merges,
                unk_token=tokens[pieces.unk_id] if 0 <= pieces.unk_id < len(tokens) else None,
                fuse_unk=True,
                byte_fallback=byte_fallback,
            )
        )
    backend.normalizer = _normalizer(pieces)
    steps = [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.add_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    _add_marks(backend, pieces, tokens)
    return backend


def _normalizer(pieces: Pieces) -> normalizers.Normalizer:
    """The prefix is put before each stretch of text between marks, as SentencePiece-based originals do."""
    steps: list[normalizers.Normalizer] = []
    if pieces.charsmap:
        steps.append(normalizers.Precompiled(pieces.charsmap))
    if pieces.remove_extra_spaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if pieces.add_space_prefix:
        steps.append(normalizers.Prepend(_MARK))
    steps.append(normalizers.Replace(" ", _MARK))
    return normalizers.Sequence(steps)


def _add_marks(backend: Tokenizer, pieces: Pieces, tokens: Sequence[str]) -> None:
    """Control pieces and <unk> are special; user-defined ones are only kept whole."""
    special, plain = [], []
    for token, kind in zip(tokens, pieces.types, strict=True):
        if not token:
            continue
        if kind in (CONTROL, UNKNOWN) or (kind == USER_DEFINED and token in pieces.special):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


# --- tokenizer.model: a protocol buffer, of which five messages' worth of fields matter ---
# https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto


def read_model(data: bytes, path: str) -> Pieces:
    """The vocabulary of a tokenizer.model file. Raises ModelError when it is not one."""
    try:
        return _read_model(data, path)
    except (IndexError, struct.error, UnicodeDecodeError):
        raise ModelError(
            f"{path} is no SentencePiece model or is damaged; download it again"
        ) from None


def _read_model(data: bytes, path: str) -> Pieces:
    tokens, scores, types = [], [], []
    trainer: dict[int, int | bytes] = {}
    normal: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            piece = dict(_fields(value))
            tokens.append(_bytes(piece.get(1, b"")).decode())
            scores.append(struct.unpack("<f", _bytes(piece.get(2, b"\0\0\0\0")))[0])
            types.append(_int(piece.get(3, NORMAL)))
        elif number == 2 and isinstance(value, bytes):
            trainer = dict(_fields(value))
        elif number == 3 and isinstance(value, bytes):
            normal = dict(_fields(value))
    if not tokens:
        raise ModelError(f"{path} is no SentencePiece model; download it again")
    kind = _int(trainer.get(3, 1))
    if kind not in (1, 2):
        raise ModelError(
            f"{path} is a SentencePiece model of words or characters; only BPE and unigram are supported"
        )
    return Pieces(
        tokens,
        scores,
        types,
        unigram=kind == 1,
        unk_id=_int(trainer.get(40, 0)),
        bos_id=_int(trainer.get(41, 1)),
        eos_id=_int(trainer.get(42, 2)),
        add_space_prefix=bool(normal.get(3, 1)),
        remove_extra_spaces=bool(normal.get(4, 1)),
        charsmap=_bytes(normal.get(2, b"")),
    )


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise IndexError
    return value - (1 << 64) if value >> 63 else value


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise IndexError
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of one message; fixed-width ones come as their bytes."""
    pos = 0
    while pos < len(data):
        tag, pos = _varint(data, pos)
        wire = tag & 7
        if wire == 0:
            value, pos = _varint(data, pos)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, pos = _varint(data, pos)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise IndexError
        if pos + size > len(data):
            raise IndexError
        yield tag >> 3, data[pos : pos + size]
        pos += size


def _varint(data: bytes, pos: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[pos]
        value |= (byte & 0x7F) << shift
        pos += 1
        if byte < 0x80:
            return value, pos
        shift += 7
