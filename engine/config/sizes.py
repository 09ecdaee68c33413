"""Sizes as people write them: "4GiB", "512M", "25.6k", 8192. Torch-free.

Units, for bytes and for token counts alike:

    k  m  g  t          powers of 1000   25.6k = 25,600    1m = 1,000,000
    kB MB GB TB         powers of 1000   4GB = 4,000,000,000
    K  M  G  T          powers of 1024   32K = 32,768      512M = 536,870,912
    Ki Mi Gi Ti (+ B)   powers of 1024   4GiB = 4,294,967,296
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_NUMBER = re.compile(r"\s*(\d[\d_,]*(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_LETTERS = "kmgt"
EXAMPLES = "8192, 25.6k, 32K, 512M, 4GiB"


def _multiplier(unit: str) -> int | None:
    """1 for no unit or "B"; None for a unit nobody defined."""
    if unit in ("", "B", "b"):
        return 1
    power = _LETTERS.find(unit[0].lower()) + 1
    rest = unit[1:]
    binary = rest in ("i", "iB") or (rest == "" and unit[0].isupper())
    if power == 0 or (not binary and rest not in ("", "B", "b")):
        return None
    return int((1024 if binary else 1000) ** power)


def parse_size(value: Any) -> int:
    """A whole number from `value` (int or text). ValueError says what is wrong and shows examples."""
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a size; examples: {EXAMPLES}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{value} is negative; a size is 0 or more")
        return value
    match = _NUMBER.fullmatch(str(value))
    multiplier = _multiplier(match.group(2)) if match else None
    if match is None or multiplier is None:
        raise ValueError(f"{value!r} is not a size; examples: {EXAMPLES}")
    exact = Fraction(re.sub("[_,]", "", match.group(1))) * multiplier
    if exact.denominator != 1:
        raise ValueError(
            f"{value!r} is not a whole number ({float(exact):g}); examples: {EXAMPLES}"
        )
    return int(exact)


def format_bytes(count: float) -> str:
    """Bytes for people, powers of 1024: "0 B", "512 MiB", "1.25 GiB"."""
    value, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, bigger
    digits = 0 if unit == "B" or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def format_count(count: int) -> str:
    """A count with thousands separators: "131,072"."""
    return f"{count:,}"
