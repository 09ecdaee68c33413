"""The engine without its process, on the CPU: requests in, tokens out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.cli.conformance import local_engine
from headrace.cli.conformance.local_engine import CACHE_BYTES, Answer, config_for, greedy
from headrace.platforms.cpu.platform import CpuPlatform

__all__ = ["CACHE_BYTES", "Answer", "LocalEngine", "config_for", "greedy"]


class LocalEngine(local_engine.LocalEngine):
    """See cli/conformance/local_engine.py."""

    def __init__(self, model: Path | str, **settings: Any) -> None:
        super().__init__(model, CpuPlatform.probe()[0], **settings)
