"""Stop strings over a stream of text deltas.

All stop strings are one automaton (Aho-Corasick): each character costs a dictionary look-up, whatever the number of
strings and however long the output. Its state is the longest end of the text that may begin a stop string, and just
that much is withheld. The string that is complete first wins; of several complete at one character, the longest.
So the result does not depend on how the text was cut into deltas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec


class _State:
    __slots__ = ("depth", "fail", "found", "next")

    def __init__(self, depth: int):
        self.depth = depth  # characters of a stop string matched here
        self.next: dict[str, _State] = {}
        self.fail: _State | None = None  # the state of the longest proper end of this one
        self.found: str | None = None  # the longest stop string that ends here


class StopStrings:
    """The automaton of a request's stop strings; its choices share it. ValueError for an empty string among them."""

    __slots__ = ("root",)

    def __init__(self, stops: Sequence[str]):
        if not all(stops):
            raise ValueError("stop holds an empty string")
        self.root = _State(0)
        for stop in stops:
            state = self.root
            for char in stop:
                if char not in state.next:
                    state.next[char] = _State(state.depth + 1)
                state = state.next[char]
            state.found = stop
        self._link()

    def _link(self) -> None:
        waiting = deque([self.root])
        while waiting:
            state = waiting.popleft()
            for char, child in state.next.items():
                fail = state.fail
                while fail is not None and char not in fail.next:
                    fail = fail.fail
                child.fail = fail.next[char] if fail is not None else self.root
                child.found = child.found or child.fail.found
                waiting.append(child)

    def __bool__(self) -> bool:
        return bool(self.root.next)


class StopMatch(msgspec.Struct, frozen=True):
    """`text`: what comes before the stop string and was not released yet; `stop`: the string."""

    text: str
    stop: str


class StopScanner:
    """One choice's place in its text. After a match or a flush the scanner is used up."""

    __slots__ = ("_held", "_root", "_state")

    def __init__(self, stops: StopStrings):
        self._root = self._state = stops.root
        self._held = ""

    @property
    def held(self) -> int:
        """Characters withheld."""
        return len(self._held)

    def push(self, delta: str) -> str | StopMatch:
        """The text that can no longer be part of a stop string, or the match."""
        state, root = self._state, self._root
        for index, char in enumerate(delta):
            while char not in state.next and state is not root:
                state = state.fail or root
            state = state.next.get(char, root)
            if state.found is not None:
                text = self._held + delta[: index + 1]
                return StopMatch(text[: len(text) - len(state.found)], state.found)
        self._state = state
        text = self._held + delta
        keep = len(text) - state.depth
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """The end: what was withheld is no stop string."""
        held, self._held = self._held, ""
        return held
