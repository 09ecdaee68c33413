"""Real servers at the ends of their settings, with a tiny random model without chat template and BOS.

Cases 27 and 91, and what has no number: contexts of a few tokens, one row, a few blocks, odd keys, two servers at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.e2e.live_server import LiveServer, live_server

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
TINY = ("--load-format", "dummy", "--dtype", "float32", "--num-gpu-blocks-override", "256")


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and a tokenizer: one token a byte, no special tokens, no template."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({mark: i for i, mark in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def test_case_91_27_without_template_and_bos(base_model: Path, tmp_path: Path) -> None:
    with live_server(base_model, tmp_path, *TINY) as server:
        user = [{"role": "user", "content": "hi"}]
        error = error_of(server.post("/v1/chat/completions", messages=user), 400)
        assert "no chat template" in error["message"] and "--chat-template" in error["message"]
        for prompt in ("", [""], [], [[]]):
            assert error_of(server.post("/v1/completions", prompt=prompt), 400)["param"] == "prompt"
        assert server.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
        server.check_log()


@pytest.mark.parametrize(
    "template", ["{{ '' }}", "{% for m in messages %}{{ m.content }}{% endfor %}"]
)
def test_a_template_that_gives_nothing(base_model: Path, tmp_path: Path, template: str) -> None:
    with live_server(base_model, tmp_path, *TINY, "--chat-template", template) as server:
        empty = [{"role": "user", "content": ""}]
        error = error_of(server.post("/v1/chat/completions", messages=empty), 400)
        assert error["param"] == "messages"
        server.complete()
        server.check_log()


def test_a_context_of_16_tokens_and_one_row(base_model: Path, tmp_path: Path) -> None:
    args = ("--max-model-len", "16", "--max-num-seqs", "1", "--max-num-batched-tokens", "4")
    with live_server(base_model, tmp_path, *TINY, *args) as server:
        full = server.complete(prompt=list(range(15)), max_tokens=99)
        assert full["usage"]["completion_tokens"] == 1
        assert full["choices"][0]["finish_reason"] == "length"
        for length in (16, 17, 400):
            error = error_of(server.post("/v1/completions", prompt=[7] * length), 400)
            assert error["code"] == "context_length_exceeded"
        many = server.complete(prompt=[[i] for i in range(20)], n=2, max_tokens=9)
        assert many["usage"]["completion_tokens"] == 40 * 9
        server.wait_idle()
        server.check_log()


def test_a_cache_of_few_blocks(base_model: Path, tmp_path: Path) -> None:
    """Together they need ten times the blocks that there are: each gives what it gives alone."""
    args = ("--max-model-len", "128", "--block-size", "16", "--num-gpu-blocks-override", "9")
    with live_server(base_model, tmp_path, *TINY[:4], *args) as server:
        fields = {"max_tokens": 100, "logprobs": 0}
        alone = [server.complete(prompt=[i, i + 1], **fields)["choices"][0] for i in range(10)]
        together = server.complete(prompt=[[i, i + 1] for i in range(10)], **fields)["choices"]
        assert [c["text"] for c in together] == [c["text"] for c in alone]
        server.wait_idle()
        server.check_log()


@pytest.mark.parametrize("key", ["schlüssel-😀", "a b  c", "k" * 4000, "=\"'%;&"])
def test_odd_keys(base_model: Path, tmp_path: Path, key: str) -> None:
    with live_server(base_model, tmp_path, *TINY, "--api-key", key) as server:
        url = server.url + "/v1/models"
        right = {"Authorization": b"Bearer " + key.encode()}
        assert httpx.get(url, headers=right).status_code == 200
        for wrong in (key[:-3] + "Z", key + "x", key.upper() + "!", "\u00e9"):
            headers = {"Authorization": b"Bearer " + wrong.encode()}
            assert error_of(httpx.get(url, headers=headers), 401)["code"] == "invalid_api_key"
        assert key not in server.log()


def test_the_urgent_overtakes(base_model: Path, tmp_path: Path) -> None:
    args = ("--scheduling-policy", "priority", "--max-num-seqs", "1")
    with live_server(base_model, tmp_path, *TINY, *args) as server:
        for priority in (-(2**31), 0, 2**31 - 1):
            server.complete(priority=priority)
        assert (
            error_of(server.post("/v1/completions", prompt="a", priority=2**31), 400)["param"]
            == "priority"
        )


def test_two_servers_and_a_model_that_is_deleted(base_model: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in base_model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    with (
        live_server(copy, tmp_path, *TINY) as server,
        live_server(copy, tmp_path / "other", *TINY) as other,
    ):
        assert _texts(server) == _texts(other)
        for file in copy.iterdir():
            file.unlink()
        assert _texts(server) == _texts(other)
        server.check_log()


def _texts(server: LiveServer) -> list[str]:
    return [server.complete(prompt=f"{i}", max_tokens=8)["choices"][0]["text"] for i in range(3)]
