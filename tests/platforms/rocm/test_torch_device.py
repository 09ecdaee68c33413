"""What CUDA and ROCm share of a runtime, over a recorded stand-in for PyTorch's device module."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from headrace.platforms.batch import HostArgs
from headrace.platforms.collectives import GroupSpec
from headrace.platforms.cuda.platform import CudaPlatform
from headrace.platforms.device import MemoryInfo
from headrace.platforms.graph import Graph, GraphKey
from headrace.platforms.rocm.platform import RocmPlatform
from headrace.platforms.rocm.runtime import RocmRuntime
from headrace.platforms.torch_device import collectives
from headrace.platforms.torch_device.graphs import TorchGraphs

HOST = HostArgs(np.array([1]), np.array([0, 1]))
KEY = GraphKey("decode", 1, 1)


class Module:
    """In place of torch.cuda: says in `log` what was asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = self.default = "default stream"

    def __getattr__(self, name: str) -> Any:
        def record(*_: Any, **__: Any) -> None:
            self.log.append(name)

        return record

    def graph_pool_handle(self) -> str:
        self.log.append("pool")
        return f"pool {self.log.count('pool')}"

    def current_stream(self) -> str:
        return self.current

    def default_stream(self, _: Any) -> str:
        return self.default

    def Stream(self, _: Any) -> str:
        return "a new stream"

    @contextmanager
    def stream(self, stream: str) -> Any:
        before, self.current = self.current, stream
        yield
        self.current = before

    def mem_get_info(self, _: Any) -> tuple[int, int]:
        return 10, 100

    def memory_reserved(self, _: Any) -> int:
        return 30

    def memory_allocated(self, _: Any) -> int:
        return 25

    def max_memory_allocated(self, _: Any) -> int:
        return 27


class Recorded:
    """In place of a graph."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def capture_begin(self, pool: str, capture_error_mode: str) -> None:
        self._module.log.append(f"begin {pool} {capture_error_mode} on {self._module.current}")

    def capture_end(self) -> None:
        self._module.log.append("end")

    def replay(self) -> None:
        self._module.log.append("replay")

    def reset(self) -> None:
        self._module.log.append("reset")


@pytest.fixture
def module(monkeypatch):
    made = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    return made


PRECISIONS = tuple(
    f"allow_{name}" for name in ("tf32", "bf16_reduced_precision_reduction", "fp16_reduced_precision_reduction")
)  # fmt: skip


@pytest.fixture(autouse=True)
def precisions():
    """Opening a device sets them for the process."""
    matmul = torch.backends.cuda.matmul
    before = {name: getattr(matmul, name) for name in PRECISIONS}
    convolutions = torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32 = convolutions
    for name, value in before.items():
        setattr(matmul, name, value)


@pytest.fixture
def runtime(module, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    return RocmRuntime(RocmPlatform.describe("gfx942"))


def test_memory_that_torch_holds_for_reuse_is_free(runtime):
    assert runtime.memory() == MemoryInfo(15, 100)
    assert runtime.peak_memory() == 27


def test_float32_stays_float32(runtime):
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def test_a_torch_without_hip_is_refused(module, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(RuntimeError, match="has no HIP; install the ROCm build"):
        RocmRuntime(RocmPlatform.describe("gfx942"))


def test_launch_options_are_the_devices(runtime):
    chosen = runtime.kernel_options("rms_norm", None, {"num_warps": 8})
    assert chosen == {"num_warps": 4}  # waves of 64


def test_captures_share_the_session_s_pool_and_leave_the_default_stream(module):
    graphs = TorchGraphs(torch.device("cpu"), lambda: Recorded(module))
    module.log.clear()
    enabled = gc.isenabled()
    with graphs.session():
        assert not gc.isenabled()
        first = graphs.capture(KEY, lambda: module.log.append("body"), HOST)
        module.current = "the engine's stream"
        graphs.capture(KEY, lambda: module.log.append("body"), HOST)
    assert gc.isenabled() == enabled
    assert module.log == [
        "synchronize", "empty_cache", "pool",
        "synchronize", "begin pool 1 thread_local on a new stream", "body", "end",
        "synchronize", "begin pool 1 thread_local on the engine's stream", "body", "end",
    ]  # fmt: skip
    module.log.clear()
    first.replay(HOST)
    assert module.log == ["replay"]


def test_later_sessions_use_the_pool_while_a_graph_lives(module):
    graphs = TorchGraphs(torch.device("cpu"), lambda: Recorded(module))

    def capture() -> Graph:
        with graphs.session():
            return graphs.capture(KEY, lambda: None, HOST)

    made = [capture(), capture()]
    assert module.log.count("pool") == 1 and module.log.count("empty_cache") == 1
    for graph in made:
        graph.release()
    capture()  # the pool went with the last graph
    assert module.log.count("pool") == 2
    assert [line for line in module.log if "begin" in line][-1].startswith("begin pool 2")


def test_a_capture_that_fails_is_ended(module):
    graphs = TorchGraphs(torch.device("cpu"), lambda: Recorded(module))
    with pytest.raises(ZeroDivisionError), graphs.session():
        graphs.capture(KEY, lambda: 1 // 0, HOST)
    assert module.log[-1] == "end" and gc.isenabled()


def test_freed_memory_goes_back_to_the_device(module, monkeypatch):
    from headrace.platforms.torch_device.runtime import TorchAllocator

    allocator = TorchAllocator(torch.device("cpu"))
    memory = allocator.reserve(64, "kv")
    assert memory.dtype == torch.uint8 and not memory.any()
    allocator.reserve(16, "kv")
    assert allocator.stats() == {"kv": 80}
    allocator.free("weights")
    assert "empty_cache" not in module.log
    allocator.free("kv")
    assert module.log[-1] == "empty_cache" and allocator.stats() == {}


def test_ranks_meet_over_rccl(runtime, monkeypatch):
    """torch.distributed has RCCL under the name of NCCL; the default group stays the hosts'."""
    said: list[Any] = []
    monkeypatch.setattr(collectives.dist, "new_group", lambda **k: said.append(k))
    monkeypatch.setattr(collectives.TorchCollectives, "barrier", lambda self: said.append("met"))
    made = collectives.NcclCollectives(GroupSpec(1, 2, "file:///none"), runtime)
    assert said == [{"backend": "nccl", "device_id": runtime.device}, "met"]
    assert made.capture_safe and (made.rank, made.world) == (1, 2)


def test_cuda_is_opened_the_same_way(module):
    from headrace.platforms.cuda.runtime import CudaRuntime

    runtime = CudaRuntime(CudaPlatform.describe("sm_90"))
    assert runtime.device == torch.device("cuda", 0) and module.log[0] == "set_device"
    assert runtime.kernel_options("rms_norm", None, {"num_warps": 8}) == {}
    assert runtime.stream() == "a new stream"
