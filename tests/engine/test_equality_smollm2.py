"""SmolLM2-135M in float32, from its GGUF file and from a folder: token for token what transformers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.engine.driver import LocalEngine, greedy
from tests.engine.test_models_gguf import transformers_model
from tests.engine.truth import Truth

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]

NEW_TOKENS = 64
SETTINGS = {"threads": 0, "max_model_len": 512}
TEXTS = (
    "The",
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "The three primary colours are red, yellow and",
    "In 1969, the first human beings",
    "Dear Sir or Madam, I am writing to",
    "She opened the door and saw",
    "A list of fruits: apple, banana,",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "1 2 3 4 5 6 7 8 9 10 11",
    "Photosynthesis is the process by which",
    "<html><head><title>",
    "The meeting starts at nine. Before that, please",
    "E = mc^2 means that",
    "SELECT name, age FROM people WHERE",
    "Il était une fois une petite fille qui",
    "The history of the city goes back to the Romans, who built " * 4,
    "Rivers carry water from the mountains to the sea. On their way they " * 8,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smollm2")


@pytest.fixture(scope="module")
def truth(smollm2_gguf: Path, folder: Path) -> Truth:
    transformers.logging.set_verbosity_error()
    model = transformers_model(smollm2_gguf)
    model.save_pretrained(folder)
    source = {"gguf_file": smollm2_gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, **source)
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    return Truth(model, prompts, [greedy(NEW_TOKENS)] * len(prompts))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 512},
        {"max_num_batched_tokens": 16, "prefix_caching": False, "overlap": False},
        {"max_num_batched_tokens": 64, "num_blocks": 17, "block_size": 16, "max_model_len": 256},
    ],
    ids=["chunks of 512", "chunks of 16", "preemption"],
)
def test_a_batch_of_16_from_a_folder(truth: Truth, folder: Path, settings: Any) -> None:
    with LocalEngine(folder, **{**SETTINGS, **settings}) as engine:
        truth.check(engine.run(truth.prompts, truth.params))
        if "num_blocks" in settings:
            assert engine.scheduler.stats().preemptions > 0


def test_alone_from_the_gguf_file(truth: Truth, smollm2_gguf: Path) -> None:
    few = Truth(truth.model, truth.prompts[:4], truth.params[:4])
    with LocalEngine(smollm2_gguf, max_num_seqs=1, **SETTINGS) as engine:
        answers = engine.run(few.prompts, few.params)
    few.check(answers)
    assert answers[2].tokens == few.generate(2)
