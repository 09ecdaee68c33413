"""Sizes as people write them."""

from __future__ import annotations

import pytest

from headrace.engine.config.sizes import format_bytes, format_count, parse_size


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8192", 8192),
        (8192, 8192),
        ("0", 0),
        ("25.6k", 25_600),
        ("1m", 1_000_000),
        ("2g", 2_000_000_000),
        ("32K", 32_768),
        ("512M", 512 << 20),
        ("1.5G", 3 << 29),
        ("4GiB", 4 << 30),
        ("4 GiB", 4 << 30),
        ("1Ti", 1 << 40),
        ("4GB", 4_000_000_000),
        ("1kB", 1000),
        ("10B", 10),
        ("131,072", 131_072),
        ("1_000", 1000),
        ("0.5k", 500),
    ],
)
def test_units(text: str | int, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize(
    "text", ["", "GiB", "4Q", "4 potatoes", "-1", "1.2.3", "k4", "4iB", True, None]
)
def test_what_is_no_size_is_refused_with_examples(text: object) -> None:
    with pytest.raises(ValueError, match=r"not a size; examples: .*4GiB"):
        parse_size(text)


def test_a_fraction_of_a_unit_that_is_not_whole_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not a whole number \(1.5\)"):
        parse_size("1.5")
    with pytest.raises(ValueError, match="not a whole number"):
        parse_size("0.0001k")


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        parse_size(-5)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (512 << 20, "512 MiB"),
        (5 << 28, "1.25 GiB"),
        (3 << 50, "3072 TiB"),
    ],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_counts_for_people() -> None:
    assert format_count(131072) == "131,072"
