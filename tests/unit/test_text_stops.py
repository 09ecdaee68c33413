"""Stop strings over token borders (cases 13, 14, 16, 20)."""

from __future__ import annotations

import random

import pytest

from headrace.engine.text.stops import StopMatch, StopScanner, StopStrings


def scan(deltas, stops) -> tuple[list[str], str | None]:
    """(what was shown after each delta, the stop string found)."""
    scanner, shown = StopScanner(StopStrings(stops)), []
    for delta in deltas:
        found = scanner.push(delta)
        if isinstance(found, StopMatch):
            return [*shown, found.text], found.stop
        shown.append(found)
    return [*shown, scanner.flush()], None


def test_a_stop_over_several_tokens_is_withheld():
    assert scan(["DEF", "G", "HI", "J"], ["DEFGHIJ"]) == (["", "", "", ""], "DEFGHIJ")


def test_text_before_the_stop_is_shown():
    shown, stop = scan(["M N", " O", " P ", "Q R"], ["O P Q"])
    assert ("".join(shown), stop) == ("M N ", "O P Q")


def test_held_text_is_released_when_it_cannot_match():
    assert scan(["ab", "c", "x"], ["abcd"]) == (["", "", "abcx", ""], None)
    assert scan(["aa", "b"], ["aab"]) == (["", ""], "aab")
    assert scan(["aaa", "b"], ["aab"]) == (["a", ""], "aab")  # falls back inside the string


def test_held_text_is_flushed_at_the_end():
    assert scan(["ple", "as"], ["as in"]) == (["ple", "", "as"], None)


def test_the_string_complete_first_wins_and_of_several_the_longest():
    assert scan(["abcd"], ["abcd", "bc"]) == (["a"], "bc")
    assert scan(["xbc"], ["c", "bc"]) == (["x"], "bc")
    assert scan(["xbc"], ["bc", "c"]) == (["x"], "bc")


def test_empty_strings_are_refused_and_none_is_none():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
    assert not StopStrings([])
    assert StopStrings(["a"])


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Cut by trying every end."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_equals_a_naive_search_whatever_the_cuts():
    rng = random.Random(11)
    for _ in range(2000):
        text = "".join(rng.choices("abc", k=rng.randint(0, 30)))
        count = rng.randint(1, 4)
        stops = ["".join(rng.choices("abc", k=rng.randint(1, 6))) for _ in range(count)]
        deltas, at = [], 0
        while at < len(text):
            size = rng.randint(0, 4)
            deltas.append(text[at : at + size])
            at += size
        shown, stop = scan(deltas, stops)
        assert ("".join(shown), stop) == naive(text, stops)


def test_no_more_is_withheld_than_may_begin_a_stop():
    rng = random.Random(5)
    for _ in range(300):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(2)]
        scanner, text, shown = StopScanner(StopStrings(stops)), "", ""
        for char in rng.choices("abc", k=20):
            text += char
            found = scanner.push(char)
            if isinstance(found, StopMatch):
                break
            shown += found
            held = text[len(shown) :]
            assert scanner.held == len(held)
            ends = [text[-n:] for n in range(1, len(text) + 1)]
            longest = max((len(e) for e in ends if any(s.startswith(e) for s in stops)), default=0)
            assert len(held) == longest


def test_work_does_not_grow_with_the_output():
    """The scanner keeps the held tail only, also against strings made to defeat naive matching."""
    scanner = StopScanner(StopStrings(["a" * 500 + "b"]))
    for _ in range(200):
        scanner.push("a" * 100)
        assert scanner.held <= 500
    assert isinstance(scanner.push("b"), StopMatch)
