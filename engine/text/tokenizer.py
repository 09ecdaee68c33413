"""Tokenizer: text to ids and back, one form for tokenizer.json, tokenizer.model and GGUF vocabularies. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class TemplateError(ValueError):
    """The chat template refused the messages (its own words), or there is none. The API answers 400."""


class Tokenizer(Protocol):
    """Thread-safe for encode and decode: the API calls it from a small thread pool."""

    vocab_size: int  # ids are 0 <= id < vocab_size (added tokens included)
    bos_token_id: int | None
    # every id that ends a turn (generation_config and template marks included)
    eos_token_ids: tuple[int, ...]
    special_ids: frozenset[int]
    chat_template: str | None
    # decode drops one space at the start of a text: SentencePiece writes one in front of the first word
    strips_leading_space: bool

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids; special marks written in the text are recognised. BOS/EOS added where the model wants them, once:
        a text that begins with BOS gets no second one."""

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for in running text (byte tokens and space marks resolved)."""

    def token_text(self, token_id: int) -> str:
        """token_bytes as text; ill-formed bytes become U+FFFD."""

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text by the model's chat template (sandboxed Jinja). Raises TemplateError."""
