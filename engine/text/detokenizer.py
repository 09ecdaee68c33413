"""Incremental detokenizer: token ids to text deltas, one for each choice.

Text is the concatenation of token bytes read as UTF-8. A character whose bytes are not all there yet is held back, so
the deltas joined are the text of the whole whatever the chunks were, and U+FFFD appears only for bytes that are
ill-formed for good (one for each ill-formed part). The text continues the prompt: a first token that begins with a
space keeps it.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable

from headrace.engine.text.tokenizer import Tokenizer


class Detokenizer:
    """`start_of_text`: the ids are a whole text, not the continuation of a prompt, so the space that SentencePiece
    writes in front of the first word is dropped (as `Tokenizer.decode` does)."""

    __slots__ = ("_bytes_of", "_pending", "_skipped", "_strip")

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, start_of_text: bool = False
    ):
        self._bytes_of = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._strip = start_of_text and tokenizer.strips_leading_space
        self._pending = b""

    @property
    def pending(self) -> bytes:
        """Bytes of a character that is not complete."""
        return self._pending

    def push(self, ids: Iterable[int]) -> str:
        skipped, bytes_of = self._skipped, self._bytes_of
        return self._decode(b"".join([bytes_of(i) for i in ids if i not in skipped]), False)

    def push_one(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._decode(self._bytes_of(token_id), False)

    def flush(self) -> str:
        """The end: bytes of an incomplete character become U+FFFD."""
        return self._decode(b"", True) if self._pending else ""

    def _decode(self, data: bytes, final: bool) -> str:
        if self._pending:
            data = self._pending + data
        text, used = utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        if self._strip and text:
            self._strip = False
            return text[1:] if text[0] == " " else text
        return text
