"""Settings from defaults, platform, YAML and flags: who wins, who is named, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.engine.config.flag import Given
from headrace.engine.config.names import all_spellings
from headrace.engine.config.resolve import ConfigError, get, merge_defaults, resolve, source_of
from headrace.engine.config.settings import EngineConfig
from headrace.platforms.platform import Default


def _given(name: str, value: Any) -> Given:
    return Given(all_spellings()[name].flag, value, f"flag {name}")


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(text: str) -> Path:
        file = tmp_path / "serve.yaml"
        file.write_text(text)
        return file

    return write_file


def test_nothing_given_is_the_defaults_with_no_provenance() -> None:
    assert resolve() == EngineConfig()


def test_flags_win_over_the_file_and_the_file_over_the_platform(write: Any) -> None:
    file = write("max-num-seqs: 64\ndtype: float32\n")
    config = resolve([_given("--dtype", "bfloat16")], file)
    config = merge_defaults(
        config,
        {
            "scheduler.max_num_seqs": Default(8, "two cores"),
            "model.dtype": Default("float16", "half the memory"),
            "scheduler.max_num_batched_tokens": Default(512, "chunks of 0.1 s"),
        },
        "platform cpu",
    )
    assert config.model.dtype == "bfloat16"
    assert config.scheduler.max_num_seqs == 64
    assert config.scheduler.max_num_batched_tokens == 512
    sources = {row.path: (row.source, row.reason) for row in config.provenance}
    assert sources["model.dtype"] == ("flag --dtype", "")
    assert sources["scheduler.max_num_seqs"] == (f"file {file}:1 max-num-seqs", "")
    assert sources["scheduler.max_num_batched_tokens"] == ("platform cpu", "chunks of 0.1 s")


def test_merging_defaults_leaves_the_old_configuration_alone() -> None:
    before = resolve()
    after = merge_defaults(before, {"cache.block_size": Default(32, "why")}, "platform x")
    assert before.cache.block_size == 0 and before.provenance == ()
    assert after.cache.block_size == 32


def test_auto_is_left_to_the_platform() -> None:
    """Who types --dtype auto gets what he would get without it."""
    config = resolve([_given("--dtype", "auto")])
    proposals = {"model.dtype": Default("bfloat16", "the device's own")}
    after = merge_defaults(config, proposals, "platform x")
    row = source_of(after, "model.dtype")
    assert after.model.dtype == "bfloat16" and row is not None and row.source == "platform x"


def test_an_alias_is_named_as_it_was_typed() -> None:
    config = resolve([_given("--context-length", "4k")])
    row = source_of(config, "model.max_model_len")
    assert row is not None and row.source == "flag --context-length" and row.value == 4000
    assert source_of(config, "model.dtype") is None


def test_file_takes_flag_names_aliases_and_sections(write: Any) -> None:
    file = write(
        "model: ./m.gguf\n"
        "max_num_seqs: 3\n"
        "--port: 9000\n"
        "tp: 2\n"
        "disable-radix-cache: true\n"
        "no-async-scheduling: true\n"
        "api-key: [a, b]\n"
        "force: {linear: reference}\n"
        "cache:\n"
        "  kv_cache_memory: 1GiB\n"
        "  kv-cache-dtype: bf16\n"
    )
    config = resolve(file=file)
    assert config.model.model == "./m.gguf"
    assert config.scheduler.max_num_seqs == 3
    assert config.server.port == 9000
    assert config.device.tensor_parallel_size == 2
    assert not config.cache.prefix_caching
    assert not config.scheduler.overlap
    assert config.server.api_keys == ("a", "b")
    assert config.device.force == {"linear": "reference"}
    assert config.cache.kv_cache_memory == 1 << 30
    assert config.cache.kv_cache_dtype == "bfloat16"
    row = source_of(config, "cache.kv_cache_dtype")
    assert row is not None and row.source == f"file {file}:11 cache.kv_cache_dtype"


def test_section_named_like_a_flag_may_hold_settings(write: Any) -> None:
    config = resolve(file=write("model: {model: demo2, dtype: fp32}\n"))
    assert (config.model.model, config.model.dtype) == ("demo2", "float32")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nmax-num-seq: 3", 1, "unknown setting a"),
        ("port: 1\nmax-num-seq: 3", 2, "did you mean max-num-seqs?"),
        ("cache:\n  blok_size: 3", 2, "cache has no setting blok_size; did you mean block_size?"),
        ("cache:\n  zzz: 3", 2, "cache has no setting zzz; it has block_size"),
        ("dtype: int3", 1, "none of auto, float32"),
        ("port: 80000", 1, "out of range"),
        ("port: true", 1, "expected a whole number"),
        ("max-num-seqs: 1.5", 1, "expected a whole number"),
        ("dtype: auto\nmodel:\n  dtype: auto", 3, "set already by"),
        ("port: 1\ncontext-length: 3\nmax-model-len: 4", 3, "set already by"),
        ("disable-radix-cache: 3", 1, "expected true or false"),
        ("port: {a: 1}", 1, "expected a whole number"),
        ("port: [", 1, "not valid YAML"),
    ],
)
def test_mistakes_in_the_file_name_their_line(write: Any, text: str, line: int, words: str) -> None:
    file = write(text)
    with pytest.raises(ConfigError) as caught:
        resolve(file=file)
    assert f"{file}:{line}" in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_that_is_no_mapping_or_not_there(write: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected names and values"):
        resolve(file=write("- a\n- b\n"))
    with pytest.raises(ConfigError, match=r"cannot read .*missing.yaml: No such file"):
        resolve(file=tmp_path / "missing.yaml")
    assert resolve(file=write("# nothing\n")) == EngineConfig()


def test_wrong_flag_value_names_the_flag_as_typed() -> None:
    with pytest.raises(ConfigError, match=r"^flag --tp: 0 is out of range; allowed is 1 or more$"):
        resolve([_given("--tp", "0")])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            [("--num-gpu-blocks-override", "8"), ("--kv-cache-memory", "1GiB")],
            "--num-gpu-blocks-override and --kv-cache-memory both set the size",
        ),
        (
            [("--worker", "inproc"), ("-tp", "2")],
            "--worker inproc runs one device and -tp asks for 2",
        ),
        (
            [("--force", ["linear=native"]), ("--disable", ["native"])],
            "linear=native is both forced and disabled",
        ),
        ([("--uds", "/tmp/x"), ("--port", "1")], "drop --host and --port"),
    ],
)
def test_settings_that_contradict_each_other(given: list[tuple[str, Any]], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([_given(name, value) for name, value in given])
    assert words in str(caught.value)


def test_a_platform_that_proposes_nonsense_is_named() -> None:
    with pytest.raises(ConfigError, match=r"platform x proposes a value for cache\.nothing"):
        merge_defaults(resolve(), {"cache.nothing": Default(1, "why")}, "platform x")
    with pytest.raises(ConfigError, match="block_size"):
        merge_defaults(resolve(), {"cache.block_size": Default("many", "why")}, "platform x")


def test_get_reads_any_path() -> None:
    assert get(EngineConfig(), "server.port") == 8000
