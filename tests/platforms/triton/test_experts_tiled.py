"""Experts over copied tiles: which devices may choose them, and how their launches are remembered."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from headrace.platforms.queries import ExpertsQuery  # noqa: E402
from headrace.platforms.triton import experts, launch  # noqa: E402
from headrace.platforms.triton.launch import Launcher, Tiled  # noqa: E402
from headrace.platforms.triton.targets import target  # noqa: E402

QUERY = ExpertsQuery(8, 2, 64, 32, "bfloat16")


def kernel(x, tiles, rows, BLOCK: tl.constexpr):
    pass


class Recorder(triton.JITFunction):
    def __init__(self, fn: Any) -> None:
        super().__init__(fn)
        self.launches: list[tuple[str, tuple[Any, ...]]] = []

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.launches.append(("jit", args))

        def direct(x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
            self.launches.append(("direct", rest[4:]))

        return SimpleNamespace(run=direct, function="f", packed_metadata=())


def test_launches_know_tiles_by_their_shape_alone(monkeypatch):
    chosen = SimpleNamespace(backend="cuda")
    active = SimpleNamespace(get_current_stream=lambda _: 7, get_current_target=lambda: chosen)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    recorder = Recorder(kernel)
    call = Launcher(recorder, {"BLOCK": 8, "num_warps": 4})
    x = torch.zeros(16)
    for rows in (16, 16, 24):  # other memory, of other shapes too
        given = Tiled(torch.zeros(rows, 8), 4, 8)
        call((1, 1, 1), x, given, 5)
    assert [kind for kind, _ in recorder.launches] == ["jit", "jit", "direct"]
    assert recorder.launches[-1][1] == (x, given, 5, 8)
    assert recorder.launches[-1][1][1] is given
    call((1, 1, 1), x, Tiled(torch.zeros(16, 8), 8, 8), 5)
    assert recorder.launches[-1][0] == "jit"
    kept = [weakref.ref(args[1].base) for _, args in recorder.launches]
    recorder.launches.clear()
    del given
    assert not any(one() is not None for one in kept)  # launches are remembered, tensors are not


def test_tiles_describe_their_tensor():
    of = Tiled(torch.zeros(6, 4, 8)[:, :, :6], 1, 4, 4)
    assert (of.shape, of.strides, of.block_shape) == ([6, 4, 6], [32, 8, 1], [1, 4, 4])


@pytest.mark.parametrize(
    ("arch", "query", "may"),
    [
        ("sm_90", QUERY, True),
        ("sm_100", QUERY, True),
        ("sm_80", QUERY, False),
        ("gfx942", QUERY, False),
        ("sm_90", ExpertsQuery(8, 2, 60, 32, "bfloat16"), False),  # rows of 120 bytes
        ("sm_90", ExpertsQuery(8, 2, 64, 36, "bfloat16"), False),
    ],
)
def test_only_devices_that_copy_tiles_are_asked(arch, query, may):
    runtime = target(arch).runtime
    assert experts.can_tile(query, runtime) == may
    asked = []

    def options(kernel: str, query: Any, given: Any) -> dict[str, Any]:
        asked.append("TILED" in given)
        return {"TILED": True, "PROGRAMS": 2} if "TILED" in given else {}

    runtime.kernel_options = options  # type: ignore[method-assign]
    chosen = [experts.product_options(name, query, runtime, 16) for name in ("gate_up", "down")]
    experts.product_options("gate_up", query, runtime, 16, few=True)
    assert asked == [may, may, False]
    assert [one.get("FLAT", False) for one in chosen] == [may, may]


def test_a_release_without_descriptors_has_no_tiles(monkeypatch):
    monkeypatch.setattr(experts, "TensorDescriptor", None)
    assert not experts.can_tile(QUERY, target("sm_90").runtime)
    assert launch.TensorDescriptor is not None


def test_weights_that_begin_anywhere_are_moved():
    w = torch.zeros(33)[1:].view(2, 16)
    assert w.data_ptr() % experts.ALIGNED
    laid = experts.TritonExperts._laid(w)
    assert not laid.data_ptr() % experts.ALIGNED
    assert experts.TritonExperts._laid(laid) is laid


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_the_options_of_a_device_fit_what_can_be_asked_for(name, monkeypatch):
    runtime = target("sm_90").runtime
    tiled, short = (experts.product_options(name, QUERY, runtime, rows) for rows in (128, 16))
    monkeypatch.setattr(experts, "TensorDescriptor", None)
    plain = experts.product_options(name, QUERY, runtime, 128)
    assert tiled["TILED"] and tiled["FLAT"] and not short["TILED"]
    assert "TILED" not in plain and plain["BLOCK_M"] == tiled["BLOCK_M"] == 128


def test_a_release_that_cannot_ask_for_dependent_launches_has_none(monkeypatch):
    runtime = target("sm_90").runtime
    asked = launch.launch_options("any", QUERY, runtime, {}, dependent=True)
    monkeypatch.setattr(launch, "DEPENDENT", False)
    assert launch.launch_options("any", QUERY, runtime, {}, dependent=True) == {"PDL": False}
    assert asked == {"PDL": True, "launch_pdl": True}
