"""The XPU runtime over a made-up torch.xpu: memory with and without queries, graphs, collectives, launch options."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from headrace.platforms.batch import HostArgs
from headrace.platforms.collectives import GroupSpec
from headrace.platforms.graph import GraphKey
from headrace.platforms.queries import AttentionQuery, NormQuery
from headrace.platforms.xpu import hardware, tuning
from headrace.platforms.xpu.platform import XpuPlatform

MIB = 1 << 20
HOST = HostArgs(None, None)  # type: ignore[arg-type]


class FakeGraph:
    """As torch.xpu.XPUGraph: capture_begin takes a pool and nothing else."""

    calls: list[str] = []  # noqa: RUF012

    def capture_begin(self, pool=None):
        self.calls.append(f"begin {pool}")

    def capture_end(self):
        self.calls.append("end")

    def replay(self):
        self.calls.append("replay")

    def reset(self):
        self.calls.append("reset")


def silent(*_args, **_kwargs):
    return None


@pytest.fixture
def fake(monkeypatch):
    """torch.xpu with 300 MiB reserved, 100 of them in use; queries of free memory are a setting."""
    found = SimpleNamespace(free=lambda _device: (500 * MIB, 1000 * MIB), total=900 * MIB)
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.xpu, name, silent)
    values = {
        "memory_reserved": lambda _device: 300 * MIB,
        "memory_allocated": lambda _device: 100 * MIB,
        "max_memory_allocated": lambda _device: 7,
        "mem_get_info": lambda device: found.free(device),
        "get_device_properties": lambda _device: SimpleNamespace(total_memory=found.total),
        "graph_pool_handle": lambda: "pool",
        "XPUGraph": FakeGraph,
        "stream": lambda _stream: contextlib.nullcontext(),
    }
    for name, value in values.items():
        monkeypatch.setattr(torch.xpu, name, value, raising=False)
    monkeypatch.setattr(FakeGraph, "calls", [])
    monkeypatch.setattr(hardware, "host_memory", lambda: (250 * MIB, 800 * MIB))
    return found


def opened(arch="bmg", **changes):
    device = dataclasses.replace(XpuPlatform.describe(arch), **changes)
    return XpuPlatform().open(device)


def sizes(runtime):
    memory = runtime.memory()
    return memory.free // MIB, memory.total // MIB


def test_memory_by_the_driver(fake):
    """What torch keeps for reuse counts as free."""
    assert sizes(opened()) == (700, 1000)


def refuse(_device):
    raise RuntimeError("The device doesn't support querying its available free memory.")


@pytest.mark.parametrize("answer", [refuse, lambda _device: (0, 0)])
def test_memory_without_a_query(fake, answer):
    fake.free = answer
    assert sizes(opened()) == (
        800,
        900,
    )  # all that this process did not reserve, and what it may reuse
    fake.total = 0
    assert sizes(opened(memory=1200 * MIB)) == (1100, 1200)  # as probing found it


@pytest.mark.parametrize("answer", [refuse, lambda _device: (0, 0)])
def test_an_integrated_gpu_has_what_the_machine_has(fake, answer):
    assert sizes(opened("lnl")) == (450, 800)
    fake.free = answer
    assert sizes(opened("lnl")) == (450, 800)


def test_memory_of_a_torch_that_has_no_query(fake, monkeypatch):
    monkeypatch.delattr(torch.xpu, "mem_get_info")
    assert sizes(opened()) == (800, 900)


def test_graphs(fake):
    runtime = opened()
    backend = runtime.graphs()
    assert backend is runtime.graphs() and not backend.traits.host_args
    with backend.session():
        graph = backend.capture(
            GraphKey("decode", 1, 1), lambda: FakeGraph.calls.append("body"), HOST
        )
    graph.replay(HOST)
    graph.release()
    assert FakeGraph.calls == ["begin pool", "body", "end", "replay", "reset"]


def test_a_body_that_fails_ends_its_capture(fake):
    backend = opened().graphs()
    with pytest.raises(ZeroDivisionError), backend.session():
        backend.capture(GraphKey("decode", 1, 1), lambda: 1 // 0, HOST)  # type: ignore[arg-type]
    assert FakeGraph.calls == ["begin pool", "end"]


def test_without_graphs_the_engine_makes_none(fake, monkeypatch):
    monkeypatch.delattr(torch.xpu, "XPUGraph")
    assert opened().graphs().traits.max_graphs == 0


def test_collectives(fake, monkeypatch):
    runtime = opened()
    from headrace.platforms.xpu.collectives import XcclCollectives

    monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda: False)
    with pytest.raises(ImportError, match="built without xccl"):
        XcclCollectives(GroupSpec(0, 2, "file:///nowhere"), runtime)
    begun = {}
    monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "new_group", lambda **k: begun.update(k))
    monkeypatch.setattr(XcclCollectives, "barrier", silent)
    made = XcclCollectives(GroupSpec(1, 2, "file:///somewhere"), runtime)
    assert begun["backend"] == "xccl" and begun["device_id"] == torch.device("xpu", 0)
    assert (made.rank, made.world, made.capture_safe) == (1, 2, False)


def test_nothing_of_another_vendor_is_touched(fake, monkeypatch):
    """Opening, asking and closing reach torch.xpu alone."""

    class Forbidden:
        def __getattr__(self, name):
            raise AssertionError(f"torch.cuda.{name} was touched")

    monkeypatch.setattr(torch, "cuda", Forbidden())
    runtime = opened()
    runtime.memory(), runtime.peak_memory(), runtime.graphs(), runtime.allocator().stats()
    runtime.reset_peak_memory(), runtime.synchronize(), runtime.close()


def test_launch_options(fake):
    query = AttentionQuery(32, 8, 128, 128, "bfloat16", "bfloat16", 0.1)
    tile = {"BLOCK_M": 128, "BLOCK_N": 64, "D_PAD": 128, "GROUP": 20, "PRECISION": "tf32"}
    given = {**tile, "num_warps": 4, "num_stages": 3}
    # eight rows for a sub-group, and so few keys that they fit its registers
    matrix = {"num_warps": 16, "num_stages": 2, "BLOCK_N": 16}
    assert opened().kernel_options("prefill", query, given) == matrix
    # on ordinary units the smallest tile that holds the heads of a group
    plain = {"num_warps": 16, "num_stages": 2, "BLOCK_M": 32, "BLOCK_N": 16}
    exact = dataclasses.replace(query, dtype="float32")
    assert opened().kernel_options("prefill", exact, given) == plain
    for arch in ("dg2", "arl", "mtl"):
        assert opened(arch).kernel_options("decode", query, given) == plain
    product = {"BLOCK_M": 64, "BLOCK_K": 64, "PRECISION": "tf32", "num_warps": 4, "num_stages": 4}
    change = opened().kernel_options("experts_down", query, product)
    assert change == {"num_warps": 8, "num_stages": 2, "BLOCK_K": 32}
    assert opened("dg2").kernel_options("experts_down", query, product)["BLOCK_K"] == 16
    assert opened().kernel_options("rms_norm", NormQuery(64, "float16"), {"num_warps": 64}) == {
        "num_warps": tuning.MOST_THREADS // tuning.LANES
    }
    assert opened().kernel_options("write", query, {}) == {}
