"""A profile by the device's own profiler, and launch options timed on the device."""

from __future__ import annotations

import pytest

from headrace.cli.bench import profile, trace
from headrace.platforms import tuned
from headrace.platforms.cuda.platform import CudaPlatform
from headrace.platforms.queries import ExpertsQuery, LinearQuery
from tests.platforms.cuda.test_engine import CudaEngine

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    reason = CudaPlatform.plausible()
    if reason:
        pytest.skip(reason)
    pytest.importorskip("transformers")
    from tests.engine.tiny_models import make_tiny

    folder = tmp_path_factory.mktemp("qwen3")
    make_tiny("qwen3", folder)
    with CudaEngine(folder, dtype="bfloat16") as engine:
        yield engine


@pytest.mark.parametrize("sizes", [(1, 100), (3, 200), (16, 50), (2, 20, 100), (1, 0, 200)])
def test_kernels_are_those_of_the_ops(engine, sizes):
    step = engine.executor.call("profile_step", *sizes)
    assert step["trace"] and not step["on_host"]
    found = trace.read(step["trace"])
    assert 0 < found.busy <= found.period
    launching = {row[0] for row in step["ops"]} & {"linear", "paged_attention"}
    for number, (op, *_) in enumerate(step["ops"]):
        assert op not in launching or found.ops[number], f"op {number}, {op}, has no kernel"
    own = sum(sum(names.values()) for names in found.ops.values())
    assert own > 0.5 * found.busy, dict(found.parts)
    rows = profile.grouped(step)
    whole = profile.summary(step, rows)
    assert whole["limit_s"] < whole["step_s"] and whole["bandwidth"] > 1e11 < whole["multiply"]
    assert "sampling" in found.parts or "inputs" in found.parts


def test_launch_options_are_timed(runtime, tmp_path):
    from headrace.platforms.triton import tuning

    queries = [
        ("linear", LinearQuery(1024, 2048, "bfloat16")),
        ("fused_experts", ExpertsQuery(16, 2, 512, 256, "bfloat16")),
    ]
    asked = [one for one in tuning.subjects(queries, runtime) if one.load.startswith(("1 ", "16 "))]
    found = list(tuning.tune(asked, runtime, tuning.GraphTimer(runtime), 60))
    for one in found:
        assert one.now > 0 and one.tried > 1 and not one.note, one
        assert one.best <= one.now
    better = {one.subject.key: dict(one.options) for one in found if one.options}
    tuned.write(tmp_path / "t.json", runtime.info.name, better)
    assert tuned.read(tmp_path / "t.json", runtime.info.name).options == better
