"""load_tokenizer: from a folder with tokenizer.json or tokenizer.model, or from a GGUF file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headrace.engine.text import gguf_vocab
from headrace.engine.text import sentencepiece as spm
from headrace.engine.text.fast import FastTokenizer, TokenizerParts
from headrace.engine.weights.gguf import GGUFPart
from headrace.engine.weights.source import ModelError, ModelFiles

_NAMED = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
# Marks that end a turn, and ends of text: where such a special token exists, generation stops at it.
_TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<turn|>")
_TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<｜end▁of▁sentence｜>")


def load_tokenizer(files: ModelFiles, chat_template: str = "") -> FastTokenizer:
    """The tokenizer of a model, or the one that `resolve_model` took in its place. Raises ModelError.

    `chat_template`: a path, or the template's text.
    """
    root = files.tokenizer_root or files.root
    if os.path.isfile(root) and not root.endswith((".json", ".model")):
        parts = _from_gguf(root)
        generation = None
    else:
        parts = _from_folder(root)
        generation = _generation_config(root, files)
    parts.eos_token_ids = _ends(parts, generation)
    if chat_template:
        parts.templates = {"default": _template(chat_template)}
    return FastTokenizer(parts)


def _from_gguf(path: str) -> TokenizerParts:
    part = GGUFPart(path)
    try:
        return gguf_vocab.from_metadata(part.metadata, path)
    finally:
        part.close()


def _from_folder(root: str) -> TokenizerParts:
    folder = root if os.path.isdir(root) else os.path.dirname(root)
    config = _read_json(os.path.join(folder, "tokenizer_config.json"))
    path = root if os.path.isfile(root) else os.path.join(folder, "tokenizer.json")
    if path.endswith(".json") and os.path.isfile(path):
        parts = TokenizerParts(_read_tokenizer_json(path))
    else:
        parts = _from_sentencepiece(path if path.endswith(".model") else folder, config)
    special_map = _read_json(os.path.join(folder, "special_tokens_map.json"))
    parts.names.update(_names(special_map))
    parts.names.update(_names(config))
    _add_tokens(parts, folder, config, special_map)
    backend = parts.backend
    bos, eos = (_id_of(backend, parts.names.get(f"{name}_token")) for name in ("bos", "eos"))
    if backend.post_processor is not None:
        parts.prefix, parts.suffix = _wrapping(backend)
    if "add_bos_token" in config:
        parts.prefix = [bos] if config["add_bos_token"] and bos is not None else []
    if "add_eos_token" in config:
        parts.suffix = [eos] if config["add_eos_token"] and eos is not None else []
    parts.bos_token_id = bos
    parts.eos_token_ids = [] if eos is None else [eos]
    parts.templates = _templates(folder, config)
    return parts


def _read_json(path: str) -> dict[str, Any]:
    """The object in a file; {} when there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object; download it again")
    return value


def _read_tokenizer_json(path: str) -> Backend:
    try:
        return Backend.from_file(path)
    except Exception as error:  # the package raises bare Exception
        raise ModelError(f"{path} cannot be read ({error}); download it again") from None


def _from_sentencepiece(path: str, config: Mapping[str, Any]) -> TokenizerParts:
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.model")
    if not os.path.isfile(path):
        raise ModelError(
            f"{os.path.dirname(path) or '.'} holds neither tokenizer.json nor tokenizer.model; "
            "pass --tokenizer with the model's repository or a folder that has one"
        )
    with open(path, "rb") as file:
        pieces = spm.read_model(file.read(), path)
    if isinstance(config.get("add_prefix_space"), bool):
        pieces.add_space_prefix = config["add_prefix_space"]
    parts = TokenizerParts(spm.build(pieces), size=len(pieces.tokens))
    for name, token_id in (("bos", pieces.bos_id), ("eos", pieces.eos_id), ("unk", pieces.unk_id)):
        if 0 <= token_id < len(pieces.tokens):
            parts.names[f"{name}_token"] = pieces.tokens[token_id]
    # A BPE model of this kind begins its texts with BOS, a unigram one (T5) ends them with EOS, unless the config
    # says otherwise.
    wanted = pieces.eos_id if pieces.unigram else pieces.bos_id
    if 0 <= wanted < len(pieces.tokens):
        (parts.suffix if pieces.unigram else parts.prefix).append(wanted)
    return parts


def _content(token: Any) -> str:
    """A special token is written as text or as an object with its flags."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _names(config: Mapping[str, Any]) -> dict[str, str]:
    found = {f"{name}_token": _content(config.get(f"{name}_token")) for name in _NAMED}
    return {name: token for name, token in found.items() if token}


def _id_of(backend: Backend, token: str | None) -> int | None:
    return backend.token_to_id(token) if token else None


def _add_tokens(
    parts: TokenizerParts, folder: str, config: Mapping[str, Any], special_map: Mapping[str, Any]
) -> None:
    """Tokens that stand beside tokenizer.json: added_tokens_decoder, added_tokens.json, named and extra ones."""
    backend = parts.backend
    wanted: dict[int, AddedToken] = {}
    for content, token_id in _read_json(os.path.join(folder, "added_tokens.json")).items():
        wanted[int(token_id)] = AddedToken(content, normalized=False)
    for key, entry in (config.get("added_tokens_decoder") or {}).items():
        flags = {f: bool(entry.get(f)) for f in ("lstrip", "rstrip", "single_word", "normalized")}
        wanted[int(key)] = AddedToken(_content(entry), special=bool(entry.get("special")), **flags)
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for token_id, token in sorted(wanted.items()):
        old = present.get(token.content)
        if old is None or (token.special and not old.special):
            backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            parts.notes.append(
                f"the added token {token.content!r} is listed as {token_id} but has the id "
                f"{backend.token_to_id(token.content)}: tokenizer files of different models are mixed"
            )
    names = [*parts.names.values(), *_extra(config), *_extra(special_map)]
    added = backend.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    for content in dict.fromkeys(names):
        # a name outside the vocabulary would get an id the model does not know
        if content not in special and backend.token_to_id(content) is not None:
            backend.add_special_tokens([AddedToken(content, normalized=False, special=True)])


def _extra(config: Mapping[str, Any]) -> Iterable[str]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(key) or ()
        yield from map(_content, extra.values() if isinstance(extra, Mapping) else extra)


def _wrapping(backend: Backend) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and behind a text, seen from a sample."""
    bare: list[int] = backend.encode("a", add_special_tokens=False).ids
    full: list[int] = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _templates(folder: str, config: Mapping[str, Any]) -> dict[str, str]:
    """chat_template.jinja > chat_template.json > tokenizer_config.json; named ones beside the default."""
    found: dict[str, str] = {}
    for source in (config, _read_json(os.path.join(folder, "chat_template.json"))):
        template = source.get("chat_template")
        if isinstance(template, str):
            found["default"] = template
        elif isinstance(template, list):
            named = [t for t in template if isinstance(t, Mapping)]
            found.update({str(t.get("name")): str(t.get("template", "")) for t in named})
    extra = os.path.join(folder, "additional_chat_templates")
    files = {"default": os.path.join(folder, "chat_template.jinja")}
    if os.path.isdir(extra):
        names = [n for n in sorted(os.listdir(extra)) if n.endswith(".jinja")]
        files.update({n.removesuffix(".jinja"): os.path.join(extra, n) for n in names})
    for name, path in files.items():
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                found[name] = file.read()
    return found


def _template(given: str) -> str:
    """The text of --chat-template: a file's, or the value itself when it is a template."""
    if os.path.isfile(given):
        with open(given, encoding="utf-8") as file:
            return file.read()
    if "{%" in given or "{{" in given or "\n" in given:
        return given
    raise ModelError(
        f"--chat-template {given} is neither a file nor a Jinja template; give the path of a .jinja file"
    )


def _generation_config(root: str, files: ModelFiles) -> Mapping[str, Any] | None:
    folder = root if os.path.isdir(root) else os.path.dirname(root)
    for path in (
        files.generation_config,
        os.path.join(folder, "generation_config.json"),
        files.config,
    ):
        if path and os.path.isfile(path):
            found = _read_json(path)
            if found.get("eos_token_id") is not None:
                return found
    return None


def _ends(parts: TokenizerParts, generation: Mapping[str, Any] | None) -> list[int]:
    """Every id that ends a turn, the source's own first."""
    given = (generation or {}).get("eos_token_id")
    ends = [i for i in (given if isinstance(given, list) else [given]) if isinstance(i, int)]
    ends += parts.eos_token_ids
    marks = _TURN_ENDS if generation else _TURN_ENDS + _TEXT_ENDS
    added = parts.backend.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if token.special}
    ends += [special[mark] for mark in marks if mark in special]
    # "<|end|>" ends a turn (Phi), except where "<|return|>" does and it only ends a part of one (gpt-oss)
    if "<|end|>" in special and "<|return|>" not in special:
        ends.append(special["<|end|>"])
    return list(dict.fromkeys(ends))
