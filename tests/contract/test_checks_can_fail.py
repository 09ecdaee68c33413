"""The checks of platforms/reference/checks find what they are for: each mistake is noticed by the check it names."""

from __future__ import annotations

import types

import pytest
import torch

from headrace.platforms.collectives import SoloCollectives
from headrace.platforms.cpu.runtime import CpuAllocator
from headrace.platforms.graph import EagerGraphs
from headrace.platforms.reference import sampling as reference
from headrace.platforms.reference.attention import ReferenceAttention
from headrace.platforms.reference.checks import attention, collectives, experts, runtime, sampling
from headrace.platforms.reference.checks.base import CheckFailed, Make
from headrace.platforms.reference.experts import ReferenceExperts


@pytest.fixture
def device(request):
    """The runtime; that name is a module's here."""
    return request.getfixturevalue("runtime")


class NoHistory(ReferenceAttention):
    """A chunk sees nothing of what came before it."""

    def plan(self, batch, group, static=None):
        plan = super().plan(batch, group, static)
        plan.seq_lens = [b - a for a, b in zip(plan.starts, plan.starts[1:], strict=False)]
        return plan


class WritesEverywhere(ReferenceAttention):
    def write(self, k, v, k_cache, v_cache, plan):
        super().write(k, v, k_cache, v_cache, plan)
        k_cache[-1], v_cache[-1] = 0, 0


class ForgetsOut(ReferenceAttention):
    def attend(self, q, k_cache, v_cache, plan, out=None, sinks=None):
        return super().attend(q, k_cache, v_cache, plan, None, sinks)


class Mixes(ReferenceAttention):
    def attend(self, q, k_cache, v_cache, plan, out=None, sinks=None):
        result = super().attend(q, k_cache, v_cache, plan, out, sinks)
        return result + result.mean() * (plan.num_reqs > 1)


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (NoHistory, "chunks do not change the result: window 0, soft cap 0"),
        (WritesEverywhere, "skipped slots are not written"),
        (ForgetsOut, "the result goes where it is asked to"),
        (Mixes, "batch mates do not matter"),
    ],
)
def test_attention(device, wrong, check):
    with pytest.raises(CheckFailed):
        attention.CHECKS[check](Make(lambda query: wrong(query, device), device), "float32")


def test_experts(device):
    class Mixed(ReferenceExperts):
        def __call__(self, x, weights, ids, packed):
            return super().__call__(x, weights, ids, packed) * (1 + 0.01 * (len(x) > 1))

    (check,) = experts.CHECKS.values()
    with pytest.raises(CheckFailed):
        check(Make(lambda query: Mixed(query, device), device), "float32")


def spoil(logits, *options):
    result = reference.sample(logits, *options)
    logits.zero_()
    return result


MISTAKES = {
    "ways to be greedy": lambda logits, *_: torch.zeros(len(logits), dtype=torch.int64),
    "equal logits are taken by rising id": lambda logits, t, k, p, m, u: (
        logits.shape[1] - 1 - reference.sample(logits.flip(1), t, k, p, m, u)
    ),
    "neutral filters change nothing": lambda logits, t, k, p, m, u: reference.sample(
        logits, t, k, p, m, u * (k < 1)
    ),
    "frequencies are the filtered probabilities: no filter": lambda logits, *_: logits.argmax(-1),
    "temperature sharpens": lambda logits, t, k, p, m, u: reference.sample(
        logits, torch.ones_like(t), k, p, m, u
    ),
    "a row does not depend on its batch": lambda logits, t, k, p, m, u: reference.sample(
        logits, t, k, p, m, u.mean().expand(len(u))
    ),
    "masked tokens are never drawn": lambda logits, *_: torch.full((len(logits),), 4000),
    "rows that are not finite harm no other": lambda logits, *_: torch.full((len(logits),), -1),
    "the logits are left alone": spoil,
}


@pytest.mark.parametrize("check", MISTAKES)
def test_sampling(device, check):
    make = Make(lambda query: MISTAKES[check], device)
    with pytest.raises(CheckFailed):
        sampling.CHECKS[check](make, "float32")


class Recycling:
    """An allocator that gives memory out as it got it back."""

    def __init__(self):
        self._memory = torch.zeros(runtime.MIB, dtype=torch.uint8)

    def reserve(self, nbytes, tag):
        return self._memory

    def free(self, tag):
        return None

    def stats(self):
        return {}


class Insomniac(CpuAllocator):
    """An allocator that only says that it gave memory back."""

    def sleep(self, tag, keep):
        return 1


class NoReplay(EagerGraphs):
    def capture(self, key, body, host):
        body()
        return types.SimpleNamespace(replay=lambda host: None, release=lambda: None)


@pytest.mark.parametrize(
    ("what", "wrong", "check"),
    [
        ("allocator", Recycling(), runtime.allocator_gives_zeros_and_counts),
        ("allocator", Insomniac(), runtime.allocator_sleeps_at_its_addresses),
        ("graphs", NoReplay(), runtime.graphs_replay_what_they_captured),
    ],
)
def test_runtime(device, registry, monkeypatch, what, wrong, check):
    monkeypatch.setattr(device, what, lambda: wrong)
    with pytest.raises(CheckFailed):
        check(device, registry)


def test_collectives(device):
    """Ranks that hear nothing of each other."""
    group = SoloCollectives()
    with pytest.raises(CheckFailed, match="rank 0 of 1"):
        collectives.check_group(group, device, 1, 2)
    group.rank, group.world = 1, 2
    with pytest.raises(CheckFailed, match="the sum of"):
        collectives.check_group(group, device, 1, 2)
