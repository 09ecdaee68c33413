"""Ops: one instance a query, a record of every decision, and the self-test."""

from __future__ import annotations

import pytest
import torch

from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.ops import CONTRACTS, Ops, shrunk
from headrace.platforms.queries import ActivationQuery, AttentionQuery, LinearQuery, SampleQuery
from headrace.platforms.reference import ops as reference
from headrace.platforms.reference.linear import ReferenceLinear
from headrace.platforms.registry import (
    Check,
    Implementation,
    Policy,
    Registry,
    SelectionError,
    SelectionReport,
)


def doubtful(query, device):
    return Check().doubt("never run here").verdict()


def right(x: torch.Tensor) -> torch.Tensor:
    return reference.silu_and_mul(x)


def wrong(x: torch.Tensor) -> torch.Tensor:
    return reference.silu_and_mul(x) * 1.01


def raising(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("illegal instruction")


class NarrowLinear(ReferenceLinear):
    made: list[LinearQuery]

    def __init__(self, query, runtime):
        super().__init__(query, runtime)
        if query.in_features == 13:
            raise OSError("libkernels.so: cannot open")


@pytest.fixture(scope="module")
def runtime():
    opened = CpuPlatform().open(CpuPlatform.probe()[0])
    yield opened
    opened.close()


def make(runtime, *rows: Implementation, **options) -> Ops:
    return Ops(Registry.with_reference(rows), runtime.info, runtime, **options)


def row(target: str, op: str = "silu_and_mul", supports=doubtful) -> Implementation:
    return Implementation(op, target, f"{__name__}:{target}", 5, supports=supports)


@pytest.fixture(autouse=True)
def this_module_is_importable(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _here())


def _here():
    import types

    module = types.ModuleType(__name__)
    module.__dict__.update(globals())
    return module


def test_equal_queries_share_an_instance(runtime):
    report = SelectionReport()
    ops = make(runtime, report=report)
    first = ops.bind("linear", LinearQuery(8, 4, "float32"))
    assert ops.bind("linear", LinearQuery(8, 4, "float32")) is first
    assert ops.bind("linear", LinearQuery(8, 5, "float32")) is not first
    assert [d.query.out_features for d in report.decisions] == [4, 5]
    assert all(d.chosen == "reference" and d.device == "cpu:0" for d in report.decisions)


@pytest.mark.parametrize(
    ("target", "chosen", "reason"),
    [
        ("right", "right", "self-test passed (largest error 0.0e+00"),
        ("wrong", "reference", "self-test failed (T=1: largest error"),
        ("raising", "reference", "self-test failed (RuntimeError: illegal instruction)"),
    ],
)
def test_self_tests_run_against_the_reference(runtime, target, chosen, reason):
    ops = make(runtime, row(target))
    ops.bind("silu_and_mul", ActivationQuery(32, "float32"))
    (decision,) = ops.report.decisions
    assert decision.chosen == chosen
    texts = {c.name: "; ".join(c.reasons) for c in decision.candidates}
    assert reason in texts[target] and "never run here" in texts[target]


def test_a_target_that_does_not_exist_is_a_reason(runtime):
    ops = make(runtime, row("missing"))
    ops.bind("silu_and_mul", ActivationQuery(32, "float32"))
    (decision,) = ops.report.decisions
    assert decision.chosen == "reference"
    assert "has no 'missing'" in decision.candidates[0].reasons[0]


def test_a_library_that_is_missing_when_the_instance_is_made(runtime):
    ops = make(runtime, row("NarrowLinear", "linear", lambda q, d: Check().verdict()))
    ops.bind("linear", LinearQuery(13, 4, "float32"))
    ops.bind("linear", LinearQuery(14, 4, "float32"))
    assert [d.chosen for d in ops.report.decisions] == ["reference", "NarrowLinear"]
    assert "load failed: libkernels.so" in ops.report.decisions[0].candidates[0].reasons[0]


def test_quantized_weights_have_no_plain_implementation(runtime):
    with pytest.raises(SelectionError, match="Q4_0 are dequantized at load"):
        make(runtime).bind("linear", LinearQuery(32, 32, "float32", scheme="Q4_0"))
    # and an unverified kernel for them cannot be tested against nothing
    ops = make(runtime, row("NarrowLinear", "linear"))
    with pytest.raises(SelectionError, match="there is no truth"):
        ops.bind("linear", LinearQuery(256, 32, "float32", scheme="Q4_K"))


def test_policy_reaches_the_selector(runtime):
    query = ActivationQuery(32, "float32")
    ops = make(runtime, row("right"), policy=Policy(only_verified=True))
    ops.bind("silu_and_mul", query)
    assert ops.report.decisions[0].chosen == "reference"
    ops = make(runtime, row("wrong"), policy=Policy(force={"silu_and_mul": "wrong"}))
    with pytest.raises(SelectionError, match="self-test failed"):
        ops.bind("silu_and_mul", query)


def test_self_tests_are_small():
    small = shrunk(CONTRACTS["linear"], LinearQuery(8192, 128256, "bfloat16", bias=True))
    assert small == LinearQuery(1024, 512, "bfloat16", bias=True)
    assert shrunk(CONTRACTS["sample"], SampleQuery(262144, 64)) == SampleQuery(2048, 64)
    query = ActivationQuery(14336, "float32")
    for window, small_window in ((4096, 24), (16, 16), (0, 0)):
        attention = AttentionQuery(4, 2, 64, 64, "bfloat16", "bfloat16", 0.1, window=window)
        assert shrunk(CONTRACTS["paged_attention"], attention).window == small_window
    assert shrunk(CONTRACTS["silu_and_mul"], query) == query


def test_contracts_say_what_they_are():
    for name, contract in CONTRACTS.items():
        assert contract.name == name and len(contract.doc) > 40
        assert set(contract.tolerance) >= {"float32", "bfloat16", "float16"}
