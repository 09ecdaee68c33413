"""GGUF files on the device: dequantized there at load, greedy tokens as on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.platforms.cuda.platform import CudaPlatform
from tests.engine.driver import LocalEngine, greedy
from tests.engine.tiny_gguf import VOCAB, write_tiny_gguf
from tests.platforms.cuda.test_engine import CudaEngine

pytestmark = pytest.mark.device

TYPES = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")  # fmt: skip
PROMPTS = [[(7 * i + length) % VOCAB for i in range(length)] for length in (1, 5, 17, 64)]


@pytest.fixture(scope="module", autouse=True)
def device():
    reason = CudaPlatform.plausible()
    if reason:
        pytest.skip(reason)


def tokens(engine: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    with engine:
        answers = engine.run(prompts, greedy(count))
    assert not any(answer.error for answer in answers)
    return [answer.tokens for answer in answers]


def same(device: Any, host: Any, prompts: list[list[int]], count: int) -> None:
    got, want = tokens(device, prompts, count), tokens(host, prompts, count)
    # one tie of two likely tokens may fall either way, after which the answers differ
    assert sum(a != b for a, b in zip(got, want, strict=True)) <= 1, (got, want)


@pytest.mark.parametrize("name", TYPES)
def test_every_type_of_blocks(tmp_path, name):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, name)
    same(CudaEngine(path), LocalEngine(path), PROMPTS, 16)


def test_blocks_are_wanted_but_have_no_kernel(tmp_path):
    """In bfloat16, the device's own dtype, where the CPU would compute on the blocks."""
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "Q4_K")
    with CudaEngine(path, dtype="bfloat16") as engine:
        chosen = {row["op"]: row["chosen"] for row in engine.info.selection}
        assert chosen["linear"] == "triton"
        answers = engine.run(PROMPTS, greedy(8))
    assert all(len(answer.tokens) == 8 and not answer.error for answer in answers)


REAL = {
    "smollm2_gguf": [[504, 3575, 282, 4649, 314], [6106, 1296, 14797, 42, 198, 33, 30, 2382, 198]],
    "gemma3_gguf": [[2, 818, 5279, 529, 7001, 563], [2, 1613, 1806, 22640, 236787, 107, 236770]],
}


@pytest.mark.model
@pytest.mark.parametrize("file", REAL)
def test_real_files(request, file):
    path: Path = request.getfixturevalue(file)
    host = LocalEngine(path, max_model_len=128, threads=0)
    same(CudaEngine(path, max_model_len=128), host, REAL[file], 16)
