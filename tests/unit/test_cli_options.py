"""Options made from the flag table: what a command receives for what was typed."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from headrace.cli.errors import CliError
from headrace.cli.options import Command, with_flags
from headrace.engine.config.flag import Given
from headrace.engine.config.resolve import resolve


@pytest.fixture
def parse() -> Any:
    """Runs a command with every flag of the table and an option of its own; returns what it was given."""
    got: dict[str, Any] = {}
    app = typer.Typer()

    @app.command(cls=Command)
    @with_flags()
    def command(
        ctx: typer.Context,
        model: str = typer.Argument(""),
        count: int = typer.Option(1, "--count", "-n"),
        *,
        given: list[Given],
    ) -> None:
        got.update(model=model, count=count, given=given)

    def call(*args: str) -> dict[str, Any]:
        app(args=list(args), standalone_mode=False)
        return got

    return call


def _summary(given: list[Given]) -> list[tuple[str, Any, str]]:
    return [(row.flag.name, row.value, row.source) for row in given]


def test_nothing_typed_nothing_given(parse: Any) -> None:
    assert parse("demo") == {"model": "demo", "count": 1, "given": []}


@pytest.mark.parametrize(
    ("args", "name", "value", "typed"),
    [
        (("--max-model-len", "4k"), "--max-model-len", "4k", "--max-model-len"),
        (("--max-model-len=4k",), "--max-model-len", "4k", "--max-model-len"),
        (("--max_model_len", "4k"), "--max-model-len", "4k", "--max_model_len"),
        (("--context-length", "4k"), "--max-model-len", "4k", "--context-length"),
        (("-tp", "2"), "--tensor-parallel-size", "2", "-tp"),
        (("--tp=2",), "--tensor-parallel-size", "2", "--tp"),
        (("--max-model-len", "-1"), "--max-model-len", "-1", "--max-model-len"),
        (("--chat-template", "--weird"), "--chat-template", "--weird", "--chat-template"),
        (("--enable-prefix-caching",), "--enable-prefix-caching", True, "--enable-prefix-caching"),
        (
            ("--no-enable-prefix-caching",),
            "--enable-prefix-caching",
            False,
            "--no-enable-prefix-caching",
        ),
        (("--disable-radix-cache",), "--enable-prefix-caching", False, "--disable-radix-cache"),
        (("--api-key", "a", "--api-key=b"), "--api-key", ["a", "b"], "--api-key"),
    ],
)
def test_every_spelling(
    parse: Any, args: tuple[str, ...], name: str, value: Any, typed: str
) -> None:
    got = parse("demo", *args)
    assert got["model"] == "demo"
    assert _summary([*got["given"]]) == [(name, value, f"flag {typed}")]
    before = parse(*args, "demo")
    assert before["model"] == "demo"


def test_own_options_stay(parse: Any) -> None:
    assert parse("-n", "3", "demo")["count"] == 3
    assert parse("-n3", "demo")["count"] == 3
    assert parse("--count=3")["count"] == 3


def test_after_two_dashes_everything_is_an_argument(parse: Any) -> None:
    assert parse("--", "--dtype")["model"] == "--dtype"


def test_unknown_names_do_not_hide_behind_their_value(parse: Any) -> None:
    with pytest.raises(CliError, match="did you mean --context-length"):
        parse("--contxt-length=3")


def test_given_resolves_to_settings(parse: Any) -> None:
    config = resolve(
        parse("--mem-fraction-static", "0.5", "--force", "a=b", "--force", "c=d")["given"]
    )
    assert config.cache.memory_utilization == 0.5
    assert config.device.force == {"a": "b", "c": "d"}
