"""Every implementation that is here against the reference, over the contracts' generated inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.platforms.collectives import OP as COLLECTIVES
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.queries import ActivationQuery
from headrace.platforms.reference.compare import compare, truth_query
from headrace.platforms.reference.queries import queries
from headrace.platforms.registry import REFERENCE, Registry, SelectionError


def rows() -> list[Any]:
    registry = Registry.with_reference(CpuPlatform().implementations())
    return [
        pytest.param(row.op, row.name, query, id=f"{row.op}-{row.name}-{i}")
        for op in CONTRACTS
        for row in registry.candidates(op)
        if row.name != REFERENCE
        for i, query in enumerate(queries(op))
    ]


@pytest.mark.parametrize(("op", "name", "query"), rows())
def test_agrees_with_the_reference(op, name, query, bind, runtime):
    try:
        candidate = bind(op, query, name)
    except SelectionError as error:
        pytest.skip(str(error))
    truth = bind(op, truth_query(CONTRACTS[op], query), REFERENCE)
    result = compare(CONTRACTS[op], query, candidate, truth, runtime.device, seed=3)
    assert result.within, f"{query}: {result.case}, largest error {result.largest}"


def test_every_op_has_queries_and_a_reference(registry):
    assert set(registry.ops()) == {*CONTRACTS, COLLECTIVES}
    for op in CONTRACTS:
        assert queries(op), op
        assert REFERENCE in [row.name for row in registry.candidates(op)]


def test_a_wrong_implementation_is_found(runtime):
    """The comparison itself can fail: in value, in shape, in dtype, by NaN."""
    contract, query = CONTRACTS["silu_and_mul"], ActivationQuery(8, "float32")

    def right(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x[:, :8]) * x[:, 8:]

    for wrong in (
        lambda x: right(x) + 1e-3,
        lambda x: right(x).double(),
        lambda x: right(x).masked_fill(x[:, :8] > 1, torch.nan),
        lambda x: right(x)[:1],
    ):
        assert not compare(contract, query, wrong, right, runtime.device).within
    assert compare(contract, query, right, right, runtime.device).within
