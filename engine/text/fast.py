"""FastTokenizer: the Tokenizer over the `tokenizers` package. Torch-free, never imports transformers.

Text comes from token bytes: each id stands for fixed bytes (`TokenBytes`), a text is their concatenation read as
UTF-8. That makes decoding incremental, O(1) a token, and equal however the ids are cut. Where it differs from
`Tokenizer.decode` of the `tokenizers` package, on purpose:
- ill-formed bytes give one U+FFFD for each ill-formed part (the Unicode rule) where its ByteFallback decoder gives one
  for each byte of the whole run, well-formed characters of the run included;
- an added token always stands for its own text, also when that text happens to spell bytes of the byte-level alphabet;
- `clean_up_tokenization_spaces` (" ." to ".") is not applied: it changes what the model said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer as Backend

from headrace.engine.text.chat import ChatRenderer
from headrace.engine.weights.source import ModelError

SPACE_MARK = "\u2581"  # SentencePiece writes a space so
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 characters stand for themselves, other bytes for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    table = {chr(b): b for b in printable}
    table.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return table


class TokenBytes:
    """Id to bytes, worked out on first use of an id and kept. Ids without a token stand for no bytes."""

    def __init__(self, backend: Backend, added: Mapping[int, str], size: int):
        self._backend = backend
        self._added = added
        self._known: list[bytes | None] = [None] * size
        steps = _decoder_steps(backend)
        self.strips_leading_space = any(map(_strips, steps))
        self._spell = self._speller({step["type"] for step in steps})

    def _speller(self, kinds: set[str]) -> Callable[[str], bytes]:
        if "ByteLevel" in kinds:
            alphabet = byte_alphabet()
            return lambda token: _byte_level(token, alphabet)
        if kinds & {"ByteFallback", "Metaspace", "Replace"}:
            return _sentencepiece
        if kinds <= {"WordPiece", "plain"}:
            return _word
        raise ModelError(
            f"the tokenizer decodes with {', '.join(sorted(kinds))}, which is not supported; "
            "use a model with a byte-level or SentencePiece tokenizer"
        )

    def __call__(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self._known):
            return b""
        known = self._known[token_id]
        if known is None:
            known = self._known[token_id] = self._work_out(token_id)
        return known

    def _work_out(self, token_id: int) -> bytes:
        token = self._added.get(token_id)
        if token is not None:
            # SentencePiece vocabularies spell runs of spaces with the mark, also as added tokens
            return (
                token.replace(SPACE_MARK, " ") if self._spell is _sentencepiece else token
            ).encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._spell(token)


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    """The decoders of the pipeline as plain data; a "plain" one when there is none."""
    if backend.decoder is None:
        return [{"type": "plain"}]
    state = json.loads(backend.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _strips(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return step.get("content") == " " and step.get("start", 0) > 0
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme") != "never"
    return step["type"] in ("WordPiece", "plain")


def _byte_level(token: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes([alphabet[c] for c in token])
    except KeyError:
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    match = _BYTE_TOKEN.match(token)
    return bytes([int(match[1], 16)]) if match else token.replace(SPACE_MARK, " ").encode()


def _word(token: str) -> bytes:
    return token[2:].encode() if token.startswith("##") else b" " + token.encode()


@dataclass(slots=True)
class TokenizerParts:
    """What a source (a folder, a GGUF file) says of its tokenizer."""

    backend: Backend
    size: int = 0  # ids the source lists; the backend's own count when larger
    prefix: list[int] = field(default_factory=list)  # ids the model wants before a text (BOS)
    suffix: list[int] = field(default_factory=list)  # and behind it (EOS)
    bos_token_id: int | None = None
    eos_token_ids: list[int] = field(default_factory=list)
    templates: dict[str, str] = field(default_factory=dict)  # by name, "default" among them
    # special tokens that templates may use, by Hugging Face's names ("bos_token", ...)
    names: dict[str, str] = field(default_factory=dict)
    # sentences for people: what was guessed, and how to correct it
    notes: list[str] = field(default_factory=list)


class FastTokenizer:
    """Implements `engine.text.tokenizer.Tokenizer`. `notes` are sentences for the start-up panel."""

    def __init__(self, parts: TokenizerParts):
        backend = parts.backend
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = False  # marks in the text are recognised
        self._backend = backend
        self._prefix, self._suffix = parts.prefix, parts.suffix
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(
            parts.size, backend.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1
        )
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(parts.eos_token_ids))
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        spelled = {i: token.content for i, token in added.items()}
        # a callable, not a method: it runs for every token that is shown
        self.token_bytes = TokenBytes(backend, spelled, self.vocab_size)
        self.strips_leading_space = self.token_bytes.strips_leading_space
        self.chat_templates = parts.templates
        self.chat_template = parts.templates.get("default")
        self.notes = tuple(parts.notes)
        self._chat = ChatRenderer(parts.templates, parts.names)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # encode_batch_fast leaves the GIL while it works and keeps no offsets; encode does neither
        try:
            encoded = self._backend.encode_batch_fast([text], add_special_tokens=False)
        except TypeError:  # lone surrogates are no text for it
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            encoded = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded[0].ids
        return self._wrap(ids) if add_special_tokens else ids

    def _wrap(self, ids: list[int]) -> list[int]:
        prefix, suffix = self._prefix, self._suffix
        if prefix and ids[: len(prefix)] != prefix:
            ids = prefix + ids
        if suffix and ids[-len(suffix) :] != suffix:
            ids = ids + suffix
        return ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        # one by one: the package would spread a batch over every core, under the engine's feet
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; a leading space that SentencePiece put there is dropped, as Hugging Face does."""
        if skip_special_tokens:
            ids = [i for i in ids if i not in self.special_ids]
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text. ValueError for messages that cannot be rendered, TemplateError from the template."""
        return self._chat.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template=template,
            **kwargs,
        )
