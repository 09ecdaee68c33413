"""Real models from GGUF files against transformers with the same weights, dequantized to float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from headrace.engine.config.settings import ModelSettings
from headrace.engine.models.decoder import Decoder
from headrace.engine.weights.sources import open_source, resolve_model
from tests.engine.model_harness import Engine, load_model

CLOSE = {"rtol": 1e-3, "atol": 1e-3}
pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

# "The capital of France is"; "Once upon a time, in a small village by the sea, there lived"; "List three
# colours:\n1. red\n2."; a German sentence
SMOLLM2 = (
    [504, 3575, 282, 4649, 314],
    [6403, 1980, 253, 655, 28, 281, 253, 1165, 6560, 411, 260, 3426, 28, 665, 4161, 354, 1573],
    [6106, 1296, 14797, 42, 198, 33, 30, 2382, 198, 34, 30],
    [71, 31297, 501, 3973, 100, 325, 89, 294, 5941, 100, 28431, 43, 26026, 11659, 40365, 38315],
)
GEMMA3 = (
    [2, 818, 5279, 529, 7001, 563],
    [2, 14946, 3324, 496, 990, 236764, 528, 496, 1944, 9744, 684, 506, 5442, 236764, 993, 11742],
    [2, 1613, 1806, 22640, 236787, 107, 236770, 236761, 2604, 107, 236778, 236761],
    [2, 225668, 620, 108728, 8267, 232448, 20098, 236793, 80457, 4058, 34205, 5725, 8267],
)


@dataclass
class Pair:
    model: Decoder
    truth: Any
    prompts: tuple[list[int], ...]

    @torch.inference_mode()
    def want(self, tokens: list[int], last: int = 0) -> torch.Tensor:
        """[tokens, vocab], or those of the last tokens only."""
        result: torch.Tensor = self.truth(torch.tensor([tokens]), logits_to_keep=last).logits[0]
        return result


def transformers_model(path: Path) -> Any:
    """Its own conversion of names, row order and norms; from_pretrained would want accelerate for the same."""
    settings = load_gguf_checkpoint(str(path))["config"]
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    missing, surplus = model.load_state_dict(loaded["tensors"], strict=False)
    assert not surplus and set(missing) <= {"lm_head.weight"}, (missing, surplus)
    model.tie_weights()
    return model


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    path: Path = request.getfixturevalue(f"{request.param}_gguf")
    source = open_source(resolve_model(ModelSettings(model=str(path))))
    model = load_model(source, max_model_len=2048)
    yield Pair(
        model, transformers_model(path), {"smollm2": SMOLLM2, "gemma3": GEMMA3}[request.param]
    )
    source.close()


def test_logits(pair: Pair) -> None:
    engine = Engine(pair.model)
    for tokens in pair.prompts:
        got = engine.run(engine.sequence(), tokens, chunk=7)
        torch.testing.assert_close(got, pair.want(tokens), **CLOSE)


def test_logits_beyond_the_window(pair: Pair) -> None:
    """Longer than Gemma's window of 512 keys."""
    tokens = (pair.prompts[1] * 40)[:600]
    engine = Engine(pair.model)
    seq = engine.sequence()
    for start in range(0, 600, 100):
        got = engine.step([(seq, tokens[start : start + 100])])[0]
    torch.testing.assert_close(got, pair.want(tokens, last=100), **CLOSE)


def test_greedy_tokens(pair: Pair) -> None:
    engine = Engine(pair.model)
    for tokens in pair.prompts:
        with torch.inference_mode():
            want = pair.truth.generate(
                torch.tensor([tokens]), max_new_tokens=16, do_sample=False, eos_token_id=-1
            )
        assert engine.greedy(tokens, 16) == want[0, len(tokens) :].tolist()
