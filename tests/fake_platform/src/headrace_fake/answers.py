"""What the fake platform answers, for tests to compare with. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

# Below 2**24, so that a state is exact in float32; prime, so that sequences rarely meet.
MODULUS = 1_000_003
FACTOR = 31

RAISE, NAN, EXIT, SLEEP = 11, 12, 13, 14


def extend(state: int, token: int) -> int:
    """The state of a sequence with one more token; the empty sequence has state 0."""
    return (state * FACTOR + token + 1) % MODULUS


def next_token(tokens: Iterable[int], vocab: int, arch: str = "hash") -> int:
    """The greedy answer after `tokens` (at least one)."""
    state, last = 0, 0
    for token in tokens:
        state, last = extend(state, token), token
    return choose(state, last, vocab, arch)


def choose(state: int, last: int, vocab: int, arch: str) -> int:
    return (last + 1) % vocab if arch in ("count", "faulty") else state % vocab


def continuation(tokens: Iterable[int], length: int, vocab: int, arch: str = "hash") -> list[int]:
    """The next `length` greedy answers."""
    sequence, start = list(tokens), 0
    start = len(sequence)
    for _ in range(length):
        sequence.append(next_token(sequence, vocab, arch))
    return sequence[start:]
