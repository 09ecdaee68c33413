"""Tensor parallelism: ranks as threads with collectives in memory give the logits of one rank."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from headrace.engine.weights.source import ModelError
from headrace.platforms.collectives import SoloCollectives
from tests.engine.model_harness import Engine, load_model
from tests.engine.tiny_models import Tiny, make_tiny, prompt


class Meeting:
    """What the ranks of one group share."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=60)
        self.values: list[torch.Tensor | None] = [None] * world


class ThreadCollectives(SoloCollectives):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.world = rank, len(meeting.values)
        self._meeting = meeting

    def _everyone(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._meeting.values[self.rank] = x
        self._meeting.barrier.wait()
        values = list(self._meeting.values)
        self._meeting.barrier.wait()
        return values

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._everyone(x.clone())).sum(0)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._everyone(x), dim=dim)


def logits_of_ranks(tiny: Tiny, world: int, tokens: list[int]) -> list[torch.Tensor]:
    meeting = Meeting(world)

    def rank(index: int) -> torch.Tensor:
        model = load_model(tiny.source, collectives=ThreadCollectives(meeting, index))
        engine = Engine(model)
        return engine.run(engine.sequence(), tokens, chunk=16)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank, range(world)))


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("llama", 2),  # one KV head a rank, 99 rows of the vocabulary over 2
        ("llama-biases", 2),
        ("llama-tied", 2),
        ("qwen3", 2),
        ("mixtral", 2),
        ("qwen2_moe", 2),
        ("qwen3_moe", 2),
        ("deepseek_v2", 2),
        ("deepseek_v3", 4),
        ("gemma2", 2),
        ("gemma3", 2),
        ("llama-8-heads", 4),  # two ranks share a KV head
    ],
)
def test_ranks_agree_with_one(name: str, world: int, tmp_path: Path) -> None:
    tiny = make_tiny(name, tmp_path)
    tokens = prompt(50)
    want = tiny.logits(tokens)
    for got in logits_of_ranks(tiny, world, tokens):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    tiny = make_tiny("llama", tmp_path)
    with pytest.raises(ModelError, match="6 attention heads cannot be divided over 4 workers"):
        load_model(tiny.source, collectives=ThreadCollectives(Meeting(4), 0))
