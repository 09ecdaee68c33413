"""The sampler alone: randomness, penalties, bias, masks, log-probabilities, rows that are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.step import NewRow, StepPlan
from headrace.engine.runner.batch import BatchBuilder, SampleInputs
from headrace.engine.runner.randomness import uniform
from headrace.engine.runner.rows import Rows
from headrace.engine.runner.sampler import Sampler, SamplingOps, score
from headrace.engine.runner.staging import Transfers
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.reference.sampling import logprobs, penalties, sample

VOCAB = 50


class Bench:
    """Rows filled by hand; every row samples its next token."""

    def __init__(
        self,
        *requests: tuple[list[int], int, SamplingParams],
        runtime: DeviceRuntime | None = None,
        ops: SamplingOps | None = None,
    ) -> None:
        """Of each request: tokens so far, how many of them are the prompt, parameters."""
        runtime = runtime or CpuPlatform().open(CpuPlatform.probe()[0])
        transfers = Transfers(runtime)
        self.rows = Rows(len(requests), 64, runtime, transfers)
        self.rows.bind_tables(1, 16)
        ops = ops or SamplingOps(sample, logprobs, penalties)
        self.sampler = Sampler(self.rows, ops, transfers)
        count = len(requests)
        self.plan = StepPlan(
            0,
            np.arange(count, dtype=np.int32),
            np.array([len(tokens) - 1 for tokens, _, _ in requests], np.int32),
            np.ones(count, np.int32),
            np.ones(count, np.bool_),
            count,
            [
                NewRow(row, str(row), np.array(tokens, np.int32).tobytes(), prompt, params)
                for row, (tokens, prompt, params) in enumerate(requests)
            ],
            np.zeros((0, 4), np.int32),
        )
        self.rows.apply(self.plan)
        self.builder = BatchBuilder(self.rows, 16, runtime, 64, 2 * count)

    @property
    def inputs(self) -> SampleInputs:
        return self.builder.build(self.plan).sample

    def sample(self, logits: torch.Tensor) -> list[int]:
        ids: list[int] = self.sampler.sample(logits, self.inputs).tolist()
        return ids

    def shaped(self, logits: torch.Tensor) -> torch.Tensor:
        return self.sampler._shape(logits, self.inputs)


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **params)


def random_logits(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


# Randomness


def test_uniform_is_a_pure_function_of_seed_and_position() -> None:
    seeds = np.array([1, 2, 1, 2**63 - 1], np.uint64)
    positions = np.array([5, 5, 6, 0])
    together = uniform(seeds, positions)
    alone = [uniform(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_uniform_is_uniform_over_positions_and_over_seeds() -> None:
    count = 20000
    ramp, fixed = np.arange(count), np.full(count, 7)
    for draws in (uniform(fixed, ramp), uniform(ramp, fixed), uniform(ramp, ramp)):
        assert draws.dtype == np.float32
        assert draws.min() >= 0 and draws.max() < 1
        share = np.histogram(draws, 20, (0, 1))[0] / count
        assert np.abs(share - 0.05).max() < 0.01


def test_neighbouring_seeds_are_not_the_same_stream_shifted() -> None:
    positions = np.arange(1000)
    first, second = (uniform(np.full(1000, seed), positions) for seed in (11, 12))
    assert not set(first.tolist()) & set(second.tolist())


def test_a_seeded_row_ignores_its_batch_mates() -> None:
    params = SamplingParams(temperature=0.8, seed=42)
    logits = random_logits(3)
    alone = Bench(([1, 2, 3], 2, params)).sample(logits[1:2])
    for seed in range(4):
        mates = SamplingParams(temperature=1.5, seed=seed)
        bench = Bench(([4], 1, mates), ([1, 2, 3], 2, params), ([5, 6], 1, mates))
        assert bench.sample(logits)[1] == alone[0]


def test_rows_of_unlike_seeds_differ() -> None:
    flat = torch.zeros(8, VOCAB)
    requests = [([1, 2], 2, SamplingParams(seed=seed)) for seed in range(8)]
    assert len(set(Bench(*requests).sample(flat))) > 4


@pytest.mark.parametrize(
    "params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-3}]
)
def test_filters_at_their_ends_are_greedy(params: dict[str, float]) -> None:
    logits = random_logits(6, seed=3)
    requests = [([1], 1, SamplingParams(seed=seed, **params)) for seed in range(6)]
    assert Bench(*requests).sample(logits) == logits.argmax(-1).tolist()


# Penalties, bias, masks


def test_penalties_count_what_they_should() -> None:
    """Presence and frequency: output only. Repetition: prompt and output."""
    tokens, prompt = [3, 3, 3, 9, 7, 7, 9], 4
    logits = random_logits(1, seed=1)
    for params in (
        {"presence_penalty": 0.7},
        {"frequency_penalty": -0.4},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.7},
    ):
        want = logits[0].tolist()
        for token in set(tokens):
            repetition = params.get("repetition_penalty", 1.0)
            want[token] *= repetition if want[token] < 0 else 1 / repetition
        for token in set(tokens[prompt:]):
            want[token] -= params.get("presence_penalty", 0.0)
            want[token] -= params.get("frequency_penalty", 0.0) * tokens[prompt:].count(token)
        got = Bench((tokens, prompt, greedy(**params))).shaped(logits)
        torch.testing.assert_close(got[0], torch.tensor(want))


def test_penalties_of_rows_of_unlike_lengths_stay_apart() -> None:
    params = greedy(repetition_penalty=2.0, presence_penalty=1.0)
    requests = [([1, 2, 3], 1, params), ([4], 1, greedy()), ([5] * 40, 10, params)]
    logits = random_logits(3, seed=2)
    together = Bench(*requests).shaped(logits)
    for row, request in enumerate(requests):
        torch.testing.assert_close(together[row], Bench(request).shaped(logits[row : row + 1])[0])
    torch.testing.assert_close(together[1], logits[1])


def test_penalties_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [([i, i + 1, i], 1, greedy(frequency_penalty=0.5)) for i in range(7)]
    logits = random_logits(7)
    whole = Bench(*requests).shaped(logits)
    monkeypatch.setattr("headrace.engine.runner.sampler.SLICE_ELEMENTS", 2 * VOCAB)
    torch.testing.assert_close(Bench(*requests).shaped(logits), whole, rtol=0, atol=0)


def test_sampling_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [([1], 1, SamplingParams(seed=i, top_p=0.9)) for i in range(7)]
    logits = random_logits(7)
    whole = Bench(*requests).sample(logits)
    monkeypatch.setattr("headrace.engine.runner.sampler.SLICE_ELEMENTS", 2 * VOCAB)
    assert Bench(*requests).sample(logits) == whole


def test_bias_is_added_to_its_row_alone() -> None:
    bench = Bench(([1], 1, greedy()), ([1], 1, greedy(logit_bias={5: 100.0, 2: -100.0})))
    logits = torch.zeros(2, VOCAB)
    logits[:, 2] = 1.0
    assert bench.sample(logits) == [2, 5]
    assert bench.shaped(logits)[1, [2, 5, 6]].tolist() == [-99.0, 100.0, 0.0]


def test_min_tokens_masks_stop_ids_until_reached() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 8] = 5.0
    logits[:, 3] = 4.0
    params = greedy(min_tokens=2, stop_token_ids=(8, 8))
    bench = Bench(([1, 1], 2, params), ([1, 1, 1], 2, params), ([1, 1, 1, 1], 2, params))
    assert bench.sample(logits) == [3, 3, 8]


def test_shaping_leaves_the_raw_logits() -> None:
    logits = random_logits(1)
    before = logits.clone()
    Bench(([1, 2], 1, greedy(repetition_penalty=3.0, logit_bias={1: 5.0}))).sample(logits)
    assert torch.equal(logits, before)


# Results


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(3, seed=5)
    bench = Bench(
        ([1], 1, greedy(logprobs=2, logit_bias={7: 100.0})),
        ([1], 1, greedy()),
        ([1], 1, greedy(logprobs=0)),
    )
    inputs = bench.inputs
    ids = bench.sampler.sample(logits, inputs)
    found = bench.sampler.logprobs(logits, ids, inputs)
    assert found is not None
    indices, numbers = found
    assert indices.tolist() == [0, 2]
    biased, plain = numbers.entries()
    want = logits.log_softmax(-1)
    assert biased.token_id == 7
    assert biased.logprob == pytest.approx(want[0, 7].item(), abs=1e-5)
    assert biased.rank == int((logits[0] > logits[0, 7]).sum()) + 1
    assert biased.top_ids == logits[0].topk(2).indices.tolist()
    assert biased.top_logprobs == pytest.approx(want[0].topk(2).values.tolist(), abs=1e-5)
    assert (plain.token_id, plain.rank) == (logits[2].argmax().item(), 1)
    assert plain.top_ids == [] and plain.top_logprobs == []


def test_more_candidates_than_tokens() -> None:
    logits = random_logits(1)
    *_, top_ids, top = score(logprobs, logits, torch.tensor([0]), VOCAB + 5)
    assert top_ids.shape == top.shape == (1, VOCAB)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_only_the_row_that_is_not_finite_fails(value: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=9)
    requests = [([1], 1, params), ([1, 2], 1, params), ([1, 2, 3], 1, params)]
    logits = random_logits(3)
    want = Bench(*requests).sample(logits)
    broken = logits.clone()
    broken[1, 17] = value
    got = Bench(*requests).sample(broken)
    assert got == [want[0], -1, want[2]]
