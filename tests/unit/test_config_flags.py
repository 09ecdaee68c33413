"""The flag table: every row is whole, names are unique, every flag reaches its setting."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from headrace.engine.config.flag import GROUPS, Flag, Given
from headrace.engine.config.flags import FLAGS, NOT_SUPPORTED
from headrace.engine.config.names import (
    all_spellings,
    nearest,
    normalise,
    setting_default,
    setting_paths,
    spellings,
    unknown_name,
)
from headrace.engine.config.resolve import get, resolve, source_of

SAMPLES: dict[
    str, tuple[Any, Any]
] = {  # name -> (typed, setting) where a default sample does not do
    "--api-key": (["a", "b,c"], ("a", "b", "c")),
    "--served-model-name": (["x,y"], ("x", "y")),
    "--allowed-origins": (["https://example.org"], ("https://example.org",)),
    "--force": (["linear=reference"], {"linear": "reference"}),
    "--disable": (["linear=native", "sample"], ("linear=native", "sample")),
    "--hf-overrides": ('{"rope_theta": 1e6}', {"rope_theta": 1e6}),
    "--generation-config": ("none", False),
    "--gpu-memory-utilization": ("0.5", 0.5),
    "--distributed-init": ("127.0.0.1:29500", "tcp://127.0.0.1:29500"),
    "--shutdown-timeout": ("2.5", 2.5),
    "--seed": ("0", 0),
    "--cudagraph-capture-sizes": (["8,1", "4"], (1, 4, 8)),
}


def _sample(flag: Flag) -> tuple[Any, Any]:
    """(typed value, value of the setting), different from the default."""
    if flag.name in SAMPLES:
        return SAMPLES[flag.name]
    default = setting_default(flag.path)
    if flag.kind == "switch":
        return (not default, not default)
    if flag.choices:
        other = next(choice for choice in flag.choices if choice != default)
        return (other, other)
    if isinstance(default, int):
        return (str(default + 3), default + 3)
    return ("something", "something")


def test_names_and_aliases_are_unique() -> None:
    names = [name for flag in FLAGS for name in spellings(flag)]
    assert len(names) == len(set(names)) == len(all_spellings())
    assert not {row.name for row in NOT_SUPPORTED} & set(names)


def test_paths_are_unique_and_exist() -> None:
    paths = [flag.path for flag in FLAGS]
    assert len(paths) == len(set(paths))
    assert set(paths) == set(setting_paths())


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_row_is_whole(flag: Flag) -> None:
    assert re.fullmatch(r"--[a-z][a-z0-9-]*", flag.name)
    assert all(
        re.fullmatch(r"--?[a-z][a-z0-9-]*", name) for name in (*flag.aliases, *flag.negatives)
    )
    assert flag.group in GROUPS
    assert flag.kind in ("value", "many", "switch")
    assert 10 <= len(flag.help) <= 100
    assert flag.help.endswith(".")


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_flag_reaches_its_setting_and_is_remembered(flag: Flag) -> None:
    typed, expected = _sample(flag)
    assert setting_default(flag.path) != expected
    config = resolve([Given(flag, typed, f"flag {flag.name}")])
    assert get(config, flag.path) == expected
    row = source_of(config, flag.path)
    assert row is not None and row.value == expected and row.source == f"flag {flag.name}"
    untouched = set(setting_paths()) - {flag.path}
    assert all(get(config, path) == setting_default(path) for path in untouched)


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.example], ids=lambda flag: flag.name)
def test_examples_are_accepted(flag: Flag) -> None:
    name, value = shlex.split(flag.example)
    assert all_spellings()[name].flag is flag
    flag.parser(value)


def test_the_vllm_family_and_sglang_mean_the_same_setting() -> None:
    known = all_spellings()
    pairs = {
        "--context-length": "--max-model-len",
        "--max-running-requests": "--max-num-seqs",
        "--chunked-prefill-size": "--max-num-batched-tokens",
        "--mem-fraction-static": "--gpu-memory-utilization",
        "--tp-size": "--tensor-parallel-size",
        "-tp": "--tensor-parallel-size",
        "--tokenizer-path": "--tokenizer",
        "--model-path": "--model",
        "--page-size": "--block-size",
        "--schedule-policy": "--scheduling-policy",
        "--json-model-override-args": "--hf-overrides",
    }
    assert {alias: known[alias].flag.name for alias in pairs} == pairs
    assert known["--disable-radix-cache"].negative
    assert known["--disable-radix-cache"].flag.name == "--enable-prefix-caching"
    assert known["--disable-overlap-schedule"].flag.name == "--async-scheduling"


def test_names_with_underscores() -> None:
    assert normalise("--max_model_len") == "--max-model-len"
    assert normalise("-tp") == "-tp"


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    assert unknown_name("--max-model-length", all_spellings()) == (
        "unknown option --max-model-length; did you mean --max-model-len?"
    )
    assert unknown_name("--zzzzzz", all_spellings()) == "unknown option --zzzzzz"
    assert nearest("temprature", ["temperature", "top_p"]) == "temperature"


@pytest.mark.parametrize(
    ("name", "typed", "words"),
    [
        ("--port", "70000", "out of range; allowed is 0 to 65535"),
        ("--port", "http", "whole number, 0 to 65535, got 'http'"),
        ("--max-num-seqs", "0", "allowed is 1 or more"),
        ("--gpu-memory-utilization", "0", "more than 0 and at most 1"),
        ("--gpu-memory-utilization", "nan", "more than 0 and at most 1"),
        ("--dtype", "int8", "none of auto, float32, bfloat16, float16"),
        ("--force", ["linear"], "expected OP=NAME, got 'linear'; example"),
        ("--hf-overrides", "[1]", "expected a JSON object"),
        ("--hf-overrides", "{", "expected a JSON object"),
        ("--served-model-name", [","], "at least one name"),
        ("--kv-cache-memory-bytes", "4 potatoes", "not a size; examples"),
        ("--offline", "maybe", "expected true or false"),
        ("--shutdown-timeout", "inf", "expected a number"),
        ("--distributed-init", "nowhere", "expected HOST:PORT"),
        ("--distributed-init", "file://", "expected HOST:PORT"),
    ],
)
def test_wrong_values_are_one_sentence(name: str, typed: Any, words: str) -> None:
    flag = all_spellings()[name].flag
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        flag.parser(typed)
    assert "\n" not in str(caught.value)


def test_synonyms_of_other_servers() -> None:
    known = all_spellings()
    assert known["--dtype"].flag.parser("half") == "float16"
    assert known["--max-model-len"].flag.parser("auto") == 0
    assert known["--max-model-len"].flag.parser("-1") == 0
    assert known["--max-model-len"].flag.parser("25.6k") == 25_600
    assert known["--allowed-origins"].flag.parser('["a", "b"]') == ("a", "b")
