"""The checks of `headrace conformance` over the stand-ins: what a contract asks for beyond equal results."""

from __future__ import annotations

import pytest

from headrace.platforms.npu.platform import NpuPlatform
from headrace.platforms.reference.checks import attention, experts
from headrace.platforms.reference.checks.base import Make, NothingToCheck
from headrace.platforms.reference.checks.runtime import COLLECTIVES, GRAPHS, MEMORY
from headrace.platforms.registry import Registry

CHECKS = {
    (op, name, check): run
    for op, name, checks in (
        ("paged_attention", "fia", attention.CHECKS),
        ("fused_experts", "torch_npu", experts.CHECKS),
    )
    for check, run in checks.items()
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("op", "name", "check"), CHECKS)
def test_ops(make, runtime, op, name, check, dtype):
    (row,) = [r for r in NpuPlatform().implementations() if (r.op, r.name) == (op, name)]

    def bind(query):
        verdict = row.supports(query, runtime.info)
        if verdict.status == "no":
            raise NothingToCheck("; ".join(verdict.reasons))
        return make(op, name, query)

    try:
        CHECKS[op, name, check](Make(bind, runtime), dtype)
    except NothingToCheck as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("check", {**GRAPHS, **COLLECTIVES, **MEMORY})
def test_runtime(runtime, check):
    registry = Registry.with_reference(NpuPlatform().implementations())
    try:
        {**GRAPHS, **COLLECTIVES, **MEMORY}[check](runtime, registry)
    except NothingToCheck as reason:
        pytest.skip(str(reason))
