"""Every implementation inside the whole engine: the same tokens, whichever is chosen and however steps are cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.engine.core.executor import WorkerFailed
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.registry import Registry
from tests.engine.driver import LocalEngine, greedy
from tests.engine.tiny_models import make_tiny, prompt

REGISTRY = Registry.with_reference(CpuPlatform().implementations())
NAMES = sorted({row.name for op in CONTRACTS for row in REGISTRY.candidates(op)})
PROMPTS = [prompt(length, seed=length) for length in (1, 3, 17, 33, 64, 90)]


def tokens(model: Path, name: str, chunk: int) -> list[list[int]]:
    """Greedy answers with `name` wherever an op has it."""
    having = [op for op in CONTRACTS if name in {row.name for row in REGISTRY.candidates(op)}]
    settings = {"force": dict.fromkeys(having, name), "max_num_batched_tokens": chunk}
    with LocalEngine(model, **settings) as engine:
        return [answer.tokens for answer in engine.run(PROMPTS, greedy(24))]


@pytest.mark.parametrize("family", ["llama-8-heads", "gemma2", "gemma3"])
def test_tokens_do_not_depend_on_implementations(family, tmp_path):
    make_tiny(family, tmp_path)
    truth = tokens(tmp_path, "reference", 512)
    for name in NAMES:
        try:
            got = [tokens(tmp_path, name, chunk) for chunk in (16, 512)]
        except WorkerFailed as failure:
            assert "native kernels are not built" in str(failure) and name == "native"
            continue
        assert got == [truth, truth], name
