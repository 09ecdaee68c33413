"""Launches that were done before go past Triton's own front, with just the arguments that it would pass on."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from headrace.platforms.queries import LinearQuery  # noqa: E402
from headrace.platforms.triton.ahead import compile_ahead  # noqa: E402
from headrace.platforms.triton.launch import Launcher, Launchers, launch_options  # noqa: E402


class Recorder(triton.JITFunction):
    """A kernel whose launches are written down: ("jit", "compiled" or "direct", grid, arguments)."""

    def __init__(self, fn: Any) -> None:
        super().__init__(fn)
        self.launches: list[tuple[Any, ...]] = []

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.launches.append(("compiled" if warmup else "jit", grid, args, kwargs))

        def direct(x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
            self.launches.append(("direct", (x, y, z), rest[4:], (stream, function)))

        return SimpleNamespace(run=direct, function="f", packed_metadata=())


def kernel(x, y, rows, scale, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    pass


def backwards(x, BLOCK: tl.constexpr, rows):
    pass


@pytest.fixture
def recorder(monkeypatch):
    target = SimpleNamespace(backend="cuda")
    active = SimpleNamespace(get_current_stream=lambda device: 7, get_current_target=lambda: target)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    return Recorder(kernel)


OPTIONS = {"EVEN": True, "BLOCK": 64, "num_warps": 4}
GRID = (3, 1, 1)


def test_the_third_equal_launch_is_direct(recorder):
    launch = Launcher(recorder, OPTIONS)
    x, y = torch.zeros(32), torch.zeros(32)
    for _ in range(4):
        launch(GRID, x, y, 5, 0.5)
    kinds = [entry[0] for entry in recorder.launches]
    # the first says what the arguments are, the second fills the table
    assert kinds == ["jit", "jit", "direct", "direct"]
    assert recorder.launches[0][1:] == (GRID, (x, y, 5, 0.5), OPTIONS)
    # constants in the order of the kernel's arguments
    assert recorder.launches[2][1:] == (GRID, (x, y, 5, 0.5, 64, True), (7, "f"))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: (x.double(), 5),
        lambda x: (x[1:], 5),  # 4 bytes beyond an aligned address
        lambda x: (x, 16),
        lambda x: (x, 1),
    ],
)
def test_what_kernels_are_specialized_on_is_told_apart(recorder, change):
    launch = Launcher(recorder, OPTIONS)
    y = torch.zeros(32)
    for _ in range(3):
        launch(GRID, torch.zeros(32), y, 5, 0.5)
    x, rows = change(torch.zeros(32))
    launch(GRID, x, y, rows, 0.5)
    launch(GRID, x, y, rows, 0.5)
    assert [entry[0] for entry in recorder.launches[-2:]] == ["jit", "direct"]


def test_the_table_does_not_grow_without_end(recorder):
    launch = Launcher(recorder, OPTIONS)
    launch.MOST_KNOWN = 8
    x, y = torch.zeros(32), torch.zeros(32)
    for rows in range(50):
        launch(GRID, x, y, rows, 0.5)
    assert len(launch._known) <= 8


def test_kernels_are_compiled_ahead_and_not_launched(recorder):
    launch, known = Launcher(recorder, OPTIONS), Launcher(recorder, OPTIONS)
    x, y = torch.zeros(32), torch.zeros(32)
    for _ in range(3):
        known(GRID, x, y, 5, 0.5)
    recorder.launches.clear()
    compile_ahead(lambda: [one(GRID, x, y, 5, 0.5) for one in (launch, known)])
    assert [entry[0] for entry in recorder.launches] == ["compiled", "compiled"]
    assert recorder.launches[0][1:] == (GRID, (x, y, 5, 0.5), OPTIONS)
    recorder.launches.clear()
    for one in (launch, known):
        one(GRID, x, y, 5, 0.5)
    assert [entry[0] for entry in recorder.launches] == ["jit", "direct"]


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_not_computed_ahead_is_zero(recorder, inference, monkeypatch):
    """An operator behind it takes it for indices. Fresh memory is filled with the largest numbers here."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    was = torch.are_deterministic_algorithms_enabled()
    launch, rows, found = Launcher(recorder, OPTIONS), torch.randn(4, 3), []

    def body():
        x = torch.full((1 << 16,), 7.0)
        fresh = (
            torch.empty(1 << 16, dtype=torch.int64),
            x.new_empty(1 << 16, dtype=torch.int64),
            torch.empty_like(x, dtype=torch.int64),
            torch.empty_strided((256, 256), (1, 256), dtype=torch.int64).flatten(),
        )
        for ids in fresh:
            launch(GRID, x, ids, 5, 0.5)
            found.append(rows[ids])

    torch.use_deterministic_algorithms(True)
    try:
        with torch.inference_mode(inference):
            compile_ahead(body)
    finally:
        torch.use_deterministic_algorithms(was)
    assert len(found) == 4 and all((one == rows[0]).all() for one in found)
    assert not any(entry[0] != "compiled" for entry in recorder.launches)


def test_a_kernel_is_not_compiled_ahead_again_and_again(recorder):
    launch = Launcher(recorder, OPTIONS)
    x, y = torch.zeros(32), torch.zeros(32)
    compile_ahead(lambda: [launch(GRID, x, y, 5, 0.5) for _ in range(5)])
    assert len(recorder.launches) == 2  # the first only told tensors from numbers
    compile_ahead(lambda: launch(GRID, x, y, 16, 0.5))
    assert len(recorder.launches) == 3


def test_launches_go_on_after_a_failure_ahead(recorder):
    def body():
        raise ValueError("no such step")

    with pytest.raises(ValueError, match="no such step"):
        compile_ahead(body)
    launch = Launcher(recorder, OPTIONS)
    launch(GRID, torch.zeros(32), torch.zeros(32), 5, 0.5)
    assert recorder.launches[-1][0] == "jit"


def test_constants_of_sisters_are_left_out(recorder):
    launch = Launcher(recorder, {**OPTIONS, "OTHER": 3})
    launch(GRID, torch.zeros(32), torch.zeros(32), 5, 0.5)
    assert recorder.launches[0][3] == OPTIONS


def test_constants_come_last():
    with pytest.raises(TypeError, match="constants must come behind"):
        Launcher(Recorder(backwards), {"BLOCK": 4})


def test_launchers_are_made_once_for_their_constants(recorder):
    made = Launchers(recorder, {"EVEN": True})
    assert made(BLOCK=64) is made(BLOCK=64)
    assert made(BLOCK=64) is not made(BLOCK=32)


def test_a_device_changes_options():
    class Runtime:
        info = SimpleNamespace(features=frozenset({"pdl"}))
        tuned = MappingProxyType({})

        def kernel_options(self, kernel, query, options):
            return {"num_warps": 2} if kernel == "row" else {}

    chosen = launch_options("row", None, Runtime(), OPTIONS, dependent=True)
    assert chosen == {**OPTIONS, "num_warps": 2, "PDL": True, "launch_pdl": True}
    assert launch_options("other", None, Runtime(), OPTIONS) == OPTIONS


def test_what_was_measured_stands_above_what_a_device_wants():
    query = LinearQuery(576, 960, "bfloat16")
    measured = {
        "row LinearQuery(in_features=576, out_features=960, dtype=bfloat16)": {"BLOCK": 128},
        "prefill LinearQuery(in_features=576, out_features=960, dtype=bfloat16) BLOCK_M=64": {
            "num_warps": 8,
            "num_stages": 2,  # not among the options
        },
    }

    class Runtime:
        info = SimpleNamespace(features=frozenset())
        tuned = measured

        def kernel_options(self, kernel, query, options):
            return {"BLOCK": 32}

    assert launch_options("row", query, Runtime(), OPTIONS) == {**OPTIONS, "BLOCK": 128}
    assert launch_options("gated_row", query, Runtime(), OPTIONS) == {**OPTIONS, "BLOCK": 32}
    tile = {"BLOCK_M": 64, "num_warps": 4}
    assert launch_options("prefill", query, Runtime(), tile) == {
        **tile,
        "BLOCK": 32,
        "num_warps": 8,
    }
    tile["BLOCK_M"] = 128
    assert launch_options("prefill", query, Runtime(), tile)["num_warps"] == 4
