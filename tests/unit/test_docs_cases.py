"""docs/cases.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "cases.md"


def test_every_test_of_the_page_exists() -> None:
    file, found = "", 0
    for path, name in re.findall(
        r"((?:e2e|unit|engine|contract)/\w+\.py)?(?:::(\w+))?", PAGE.read_text()
    ):
        file = path or file
        if path:
            assert (TESTS / path).is_file(), path
        if name:
            assert f"def {name}(" in (TESTS / file).read_text(), f"{file}::{name}"
        found += bool(path or name)
    assert found > 60
