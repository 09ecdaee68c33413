"""The whole engine on an out-of-tree platform: known answers, captured steps, parallel ranks, failures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.core.executor import WorkerFailed
from headrace.engine.core.sampling import SamplingParams
from headrace.engine.weights.sources import read_spec, resolve_model
from headrace.engine.workers.start import make_executor
from headrace.platforms.probe import load_platform, resolve_device
from tests.engine.driver import LocalEngine, config_for, greedy
from tests.fake_platform.model import VOCAB, write_model

pytest_plugins = ["tests.fake_platform.plugin"]


class FakeEngine(LocalEngine):
    """LocalEngine on a fake device instead of the CPU."""

    def __init__(self, model: Path, arch: str, **settings: Any) -> None:
        self.config = config_for(model, load_format="dummy", threads=0, **settings)
        files = resolve_model(self.config.model)
        self.spec = read_spec(files)
        device = load_platform("fake").describe(arch)
        self.executor = make_executor(self.config, files, self.spec, device)
        self.phases = []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, fake_platform: Path) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def prompts(count: int, shared: int = 0) -> list[list[int]]:
    """Prompts of unlike lengths whose first `shared` tokens are equal."""
    return [
        [20 + i % 7 for i in range(shared)]
        + [20 + (n * 31 + i * 7) % 250 for i in range(3 + 9 * n)]
        for n in range(count)
    ]


def check(
    engine: FakeEngine, asked: Sequence[Sequence[int]], length: int, arch: str = "hash"
) -> None:
    from headrace_fake.answers import continuation

    answers = engine.run(asked, greedy(length, stop_token_ids=()))
    for prompt, answer in zip(asked, answers, strict=True):
        assert not answer.error
        assert answer.tokens == continuation(prompt, length, VOCAB, arch)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [16, 512])
def test_answers_follow_every_token_of_the_context(model, overlap, chunk):
    with FakeEngine(model, "hash", overlap=overlap, max_num_batched_tokens=chunk) as engine:
        check(engine, prompts(8), 20)


def test_counting_device(model):
    with FakeEngine(model, "count") as engine:
        check(engine, prompts(3), 12, "count")


def test_prefix_cache_hits_give_the_same_answers(model):
    asked = prompts(6, shared=64)
    with FakeEngine(model, "hash", max_num_batched_tokens=64) as engine:
        check(engine, asked, 8)
        again = engine.run(asked, greedy(8))
        assert all(answer.cached >= 64 for answer in again)
        check(engine, asked, 8)


def test_preempted_requests_give_the_same_answers(model):
    with FakeEngine(model, "hash", num_blocks=20, max_num_batched_tokens=32) as engine:
        check(engine, [[30 + n] * 20 for n in range(6)], 60)
        assert engine.scheduler.stats().preemptions > 0


def test_sliding_window_groups(tmp_path, fake_platform):
    folder = write_model(
        tmp_path,
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        sliding_window=24,
    )
    with FakeEngine(folder, "hash", max_num_batched_tokens=32) as engine:
        check(engine, prompts(5, shared=40), 40)


def test_decode_steps_are_replayed_from_graphs(model):
    with FakeEngine(model, "graphs") as engine:
        check(engine, prompts(5), 12)
        assert "fake_graphs" in {row["chosen"] for row in engine.info.selection}


@pytest.mark.parametrize("arch", ["hash", "graphs"])
def test_two_ranks_in_processes(model, monkeypatch, arch):
    monkeypatch.setenv("HEADRACE_FAKE_ARCH", arch)
    with FakeEngine(model, arch, tensor_parallel_size=2) as engine:
        check(engine, prompts(4, shared=20), 10)


def test_sampling_on_every_kind_of_selection(model):
    params = SamplingParams(temperature=1.0, top_k=1, max_tokens=6, seed=7)
    for arch, chosen in (("hash", "reference"), ("unverified", "fresh"), ("broken", "reference")):
        with FakeEngine(model, arch) as engine:
            from headrace_fake.answers import continuation

            rows = {row["op"]: row for row in engine.info.selection}
            assert rows["sample"]["chosen"] == chosen
            answers = engine.run([[40, 41, 42]], params)
            assert answers[0].tokens == continuation([40, 41, 42], 6, VOCAB)


def test_nan_harms_only_its_own_request(model):
    with FakeEngine(model, "faulty") as engine:
        bad, good = engine.run([[15, 12], [100, 101]], greedy(8))
        assert bad.reason == "error" and bad.error
        assert good.tokens == list(range(102, 110))


def test_a_step_that_raises_is_reported(model):
    with FakeEngine(model, "faulty") as engine:
        try:
            answers = engine.run([[9]], greedy(8))
        except WorkerFailed as failure:
            assert "the fake device fell over" in str(failure)
        else:
            assert "the fake device fell over" in answers[0].error


def test_a_worker_process_that_dies_is_reported(model):
    engine = FakeEngine(model, "faulty", worker="process")
    with pytest.raises(WorkerFailed), engine:
        engine.run([[13]], greedy(8))


def test_auto_never_takes_it(fake_platform):
    found = resolve_device("auto")
    assert found.device.platform == "cpu"
    assert any(line.startswith("fake: not preferred") for line in found.others)
    assert resolve_device("fake:1").device.index == 1


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "the fake driver is too old"),
        ("crash", "signal 6"),
        ("exit", "the fake library ended the process"),
        ("hang", "no answer within 2 s"),
        ("none", "no device found"),
        ("implausible", "there is no fake hardware here"),
    ],
)
def test_a_probe_that_fails_becomes_a_reason(fake_platform, monkeypatch, how, reason):
    from headrace.platforms.probe import PlatformError, find

    monkeypatch.setenv("HEADRACE_FAKE_PROBE", how)
    finding = find("fake", timeout=2.0 if how == "hang" else 30.0)
    assert not finding.devices and reason in finding.reason
    assert resolve_device("auto", only=("cpu",)).device.platform == "cpu"
    if how != "hang":
        with pytest.raises(PlatformError, match="fake"):
            resolve_device("fake")
