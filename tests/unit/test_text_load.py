"""load_tokenizer from folders and files, the model's or another; ends of turn; BOS once (cases 88, 91, 113)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from headrace.engine.text.load import load_tokenizer
from headrace.engine.weights.source import ModelError, ModelFiles

MARKS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def backend(bos: bool = True) -> Tokenizer:
    """Byte-level: ids 0..255 by the alphabet's order, then the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(m, normalized=False) for m in MARKS])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    backend().save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    write(tmp_path / "tokenizer_config.json", config)
    return tmp_path


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def load(folder, tokenizer_root="", **options):
    generation = folder / "generation_config.json"
    files = ModelFiles(
        name="m",
        kind="safetensors",
        root=str(folder),
        weights=(),
        tokenizer_root=str(tokenizer_root or folder),
        generation_config=str(generation) if generation.exists() else "",
    )
    return load_tokenizer(files, **options)


def test_tokenizer_json_with_its_config(folder):
    tokenizer = load(folder)
    assert tokenizer.encode("a")[0] == 256 == tokenizer.bos_token_id
    assert tokenizer.vocab_size == 261
    assert tokenizer.special_ids == set(range(256, 261))
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<s>x</s>"
    assert tokenizer.decode(tokenizer.encode("é😀 x")) == "é😀 x"
    assert tokenizer.notes == ()


def test_bos_once_in_completions_and_chat(folder):
    tokenizer = load(folder)
    body = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("<s>hi") == [256, *body] == tokenizer.encode("hi")
    prompt = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.encode(prompt) == [256, *body, 257]
    assert tokenizer.encode_batch(["hi", ""]) == [[256, *body], [256]]


@pytest.mark.parametrize("flag", [True, False])
def test_config_decides_on_bos_and_eos(folder, flag):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write(
        folder / "tokenizer_config.json",
        {**config, "add_bos_token": not flag, "add_eos_token": flag},
    )
    ids = load(folder).encode("x")
    assert (ids[0] == 256, ids[-1] == 257) == (not flag, flag)


def test_ends_of_turn(folder):
    assert set(load(folder).eos_token_ids) == {257, 259}  # its own and <|im_end|>
    write(folder / "generation_config.json", {"eos_token_id": [260, 257]})
    assert load(folder).eos_token_ids == (260, 257, 259)
    write(folder / "generation_config.json", {"eos_token_id": 260})
    assert load(folder).eos_token_ids == (260, 257, 259)


def test_added_tokens_beside_the_tokenizer(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {
        "261": {"content": "<tool>", "special": False, "normalized": False},
        "262": {"content": "<img>", "special": True},
        "260": {"content": "<pad>", "special": True},
    }
    write(folder / "tokenizer_config.json", config)
    tokenizer = load(folder)
    assert tokenizer.encode("<tool><img>", add_special_tokens=False) == [261, 262]
    assert tokenizer.vocab_size == 263 and tokenizer.notes == ()
    assert 262 in tokenizer.special_ids and 261 not in tokenizer.special_ids
    config["added_tokens_decoder"]["300"] = {"content": "<far>"}
    write(folder / "tokenizer_config.json", config)
    assert "<far>" in load(folder).notes[0]


def test_old_added_tokens_json_and_extra_special_tokens(folder):
    write(folder / "added_tokens.json", {"<x>": 261, "<y>": 262})
    write(folder / "special_tokens_map.json", {"additional_special_tokens": ["<y>", "<none>"]})
    tokenizer = load(folder)
    assert tokenizer.encode("<x><y>", add_special_tokens=False) == [261, 262]
    assert 262 in tokenizer.special_ids and 261 not in tokenizer.special_ids
    assert tokenizer.vocab_size == 263  # a name outside the vocabulary gets no id


def test_places_of_the_chat_template(folder):
    chat = [{"role": "user", "content": "x"}]
    config = {
        "chat_template": [
            {"name": "default", "template": "A"},
            {"name": "tool_use", "template": "B"},
        ]
    }
    write(folder / "tokenizer_config.json", config)
    tokenizer = load(folder)
    assert tokenizer.chat_template == "A"
    assert tokenizer.render_chat(chat, tools=[{"type": "function"}]) == "B"
    write(folder / "chat_template.json", {"chat_template": "C"})
    assert load(folder).chat_template == "C"
    write(folder / "chat_template.jinja", "D")
    assert load(folder).chat_template == "D"
    (folder / "additional_chat_templates").mkdir()
    write(folder / "additional_chat_templates" / "rag.jinja", "E")
    assert load(folder).render_chat(chat, template="rag") == "E"
    write(folder / "mine.jinja", "F")
    assert load(folder, chat_template=str(folder / "mine.jinja")).chat_template == "F"
    assert load(folder, chat_template="{{ 'G' }}").render_chat(chat) == "G"
    with pytest.raises(ModelError, match="--chat-template"):
        load(folder, chat_template="no/such/file.jinja")


def test_another_tokenizer_than_the_models_own(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    backend(bos=False).save(str(other / "tokenizer.json"))
    assert load(folder, other).encode("a") != load(folder).encode("a")
    by_file = load(folder, other / "tokenizer.json")
    assert by_file.encode("a") == load(folder, other).encode("a")
    assert by_file.chat_template is None


def test_missing_and_broken_files_are_named(folder, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(
        ModelError, match=r"neither tokenizer\.json nor tokenizer\.model.*--tokenizer"
    ):
        load(empty)
    for name, text in (("tokenizer_config.json", "{"), ("tokenizer.json", "{}")):
        old = (folder / name).read_text()
        write(folder / name, text)
        with pytest.raises(ModelError, match=name):
            load(folder)
        write(folder / name, old)


def test_decoders_that_cannot_be_streamed_are_refused(folder):
    tokenizer = backend()
    tokenizer.decoder = decoders.CTC()
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError, match="CTC"):
        load(folder)


def test_sentencepiece_model_folder(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = ["the quick brown fox", "jumps over the lazy dog", "hello world"] * 30
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    write(tmp_path / "added_tokens.json", {"<|im_end|>": processor.get_piece_size()})
    write(tmp_path / "special_tokens_map.json", {"additional_special_tokens": ["<|im_end|>"]})
    tokenizer = load(tmp_path)
    assert tokenizer.encode("hello  world\n") == [1, *processor.encode("hello  world\n")]
    assert tokenizer.decode(tokenizer.encode("hello  world\n")) == "hello  world\n"
    assert tokenizer.eos_token_ids == (2, processor.get_piece_size())
    assert tokenizer.encode("<|im_end|>") == [1, processor.get_piece_size()]
    write(tmp_path / "tokenizer_config.json", {"add_bos_token": False, "add_eos_token": True})
    assert load(tmp_path).encode("fox") == [*processor.encode("fox"), 2]


def test_neither_torch_nor_transformers_is_imported():
    modules = "load, output, pool, stops, chat, detokenizer"
    code = (
        f"import sys; from headrace.engine.text import {modules}; "
        "print([m for m in ('torch', 'transformers', 'sentencepiece') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
