"""Fixtures of the HTTP cases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.scripted import Live, make_live


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """A server whose engine says "Hello" to everything; shared, so leave it as it was."""
    live = make_live()
    yield live
    live.close()
