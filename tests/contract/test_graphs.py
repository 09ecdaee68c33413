"""Runtimes: graphs, memory, streams and events, the group of one."""

from __future__ import annotations

import pytest

from headrace.platforms.reference.checks.base import NothingToCheck
from headrace.platforms.reference.checks.runtime import COLLECTIVES, GRAPHS, MEMORY

CHECKS = {**MEMORY, **GRAPHS, **COLLECTIVES}


@pytest.mark.parametrize("check", CHECKS)
def test_check(runtime, registry, check):
    try:
        CHECKS[check](runtime, registry)
    except NothingToCheck as reason:
        pytest.skip(str(reason))
