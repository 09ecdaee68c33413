"""Every family against transformers in float32: whole prompts, chunks, decode, mixed batches, past old rope limits."""

from __future__ import annotations

import pytest
import torch

from tests.engine.model_harness import Engine, load_model, make_ops
from tests.engine.tiny_models import CONFIGS, Tiny, make_tiny, prompt

LENGTHS = (1, 15, 16, 17, 64, 200)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
# Their rope depends on the length of the text; see test_length_dependent_rope.
LENGTH_DEPENDENT = ("llama-dynamic", "llama-longrope")


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=["reference", "cpu"])
def platform(request: pytest.FixtureRequest) -> str:
    return request.param


def engine_for(tiny: Tiny, longest: int, platform: str = "reference") -> Engine:
    """Within the original context of a length-dependent rope when `longest` is."""
    return Engine(load_model(tiny.source, max_model_len=longest, ops=make_ops(platform)))


def lengths_of(tiny: Tiny) -> list[int]:
    return [n for n in LENGTHS if n <= 64 or tiny.name not in LENGTH_DEPENDENT]


def test_whole_prompts(tiny: Tiny, platform: str) -> None:
    engine = engine_for(tiny, max(lengths_of(tiny)), platform)
    for length in lengths_of(tiny):
        tokens = prompt(length)
        want = tiny.logits(tokens)
        torch.testing.assert_close(engine.run(engine.sequence(), tokens), want, **CLOSE)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks(tiny: Tiny, chunk: int) -> None:
    length = 40
    tokens = prompt(length)
    engine = engine_for(tiny, 64)
    got = engine.run(engine.sequence(), tokens, chunk)
    torch.testing.assert_close(got, tiny.logits(tokens), **CLOSE)


def test_mixed_batch(tiny: Tiny, platform: str) -> None:
    """Decodes, a chunk and whole prompts of unlike lengths in one step."""
    engine = engine_for(tiny, 64, platform)
    prompts = [prompt(n, seed) for seed, n in enumerate((33, 5, 50, 17, 1))]
    computed = (32, 4, 20, 0, 0)
    seqs = [engine.sequence() for _ in prompts]
    for seq, tokens, done in zip(seqs, prompts, computed, strict=True):
        if done:
            engine.run(seq, tokens[:done])
    work = [(s, t[done:]) for s, t, done in zip(seqs, prompts, computed, strict=True)]
    for got, tokens, done in zip(engine.step(work), prompts, computed, strict=True):
        torch.testing.assert_close(got, tiny.logits(tokens)[done:], **CLOSE)


def test_only_wanted_rows(tiny: Tiny, platform: str) -> None:
    """Nothing else is computed behind the last attention, and the cache is as whole as ever."""
    engine = engine_for(tiny, 64, platform)
    first, second = prompt(12, 1), prompt(7, 2)
    seqs = [engine.sequence(), engine.sequence()]
    got = engine.step([(seqs[0], first[:10]), (seqs[1], second)], wanted=[16])
    torch.testing.assert_close(got[0], tiny.logits(second)[-1:], **CLOSE)
    assert engine.step([(seqs[0], first[10:11])], wanted=[]) == []
    got = engine.step([(seqs[0], first[11:])])
    torch.testing.assert_close(got[0], tiny.logits(first)[-1:], **CLOSE)


def test_greedy_tokens(tiny: Tiny) -> None:
    tokens = prompt(20, seed=3)
    engine = engine_for(tiny, 64)
    got = engine.greedy(tokens, 24)
    # no token sees a later one: one pass tells what follows each of them
    follows = tiny.logits([*tokens, *got[:-1]]).argmax(-1).tolist()
    assert got == follows[len(tokens) - 1 :]


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
@pytest.mark.parametrize("length", [65, 200])
def test_length_dependent_rope(name: str, length: int, tmp_path) -> None:
    """Beyond the original context the table is that of max_model_len: transformers' for a text of that length."""
    tiny = make_tiny(name, tmp_path)
    tokens = prompt(length)
    engine = engine_for(tiny, length)
    got = engine.run(engine.sequence(), tokens, chunk=50)
    torch.testing.assert_close(got, tiny.logits(tokens), **CLOSE)


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v2-dense", "gemma2", "gemma3"])
def test_bfloat16(name: str, platform: str, tmp_path) -> None:
    """Log-probabilities within 0.02 of float32's on average and 0.15 at worst (their standard deviation is about 1)."""
    tiny = make_tiny(name, tmp_path)
    tokens = prompt(64)
    engine = Engine(load_model(tiny.source, dtype=torch.bfloat16, ops=make_ops(platform)))
    got = engine.run(engine.sequence(), tokens).log_softmax(-1)
    want = tiny.logits(tokens).log_softmax(-1)
    difference = (got - want).abs()
    assert difference.mean() < 0.02 and difference.max() < 0.15
